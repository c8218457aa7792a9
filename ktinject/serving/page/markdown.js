// Markdown as nodes. Text never becomes markup: only the elements made here are there.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
// What it looks for ends where the next one might begin, so that a text of many beginnings takes no longer than another.
const INLINE =
  /(?<!`)(`{1,3})([^`]+)\1(?!`)|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^[\]]+)\]\((https?:\/\/[^\s()]+)\)/g;

function element(name, content = "") {
  const made = document.createElement(name);
  if (content) made.append(content);
  return made;
}

// Adds code, emphasis and links of one stretch of text to a node.
function inline(into, text) {
  let at = 0;
  for (const found of text.matchAll(INLINE)) {
    into.append(text.slice(at, found.index));
    const [whole, , code, bold, italic, label, address] = found;
    if (code !== undefined) into.append(element("code", code));
    else if (bold !== undefined) inline(into.appendChild(element("strong")), bold);
    else if (italic !== undefined) inline(into.appendChild(element("em")), italic);
    else {
      const link = element("a", label);
      link.href = address;
      link.rel = "noopener noreferrer";
      link.target = "_blank";
      into.append(link);
    }
    at = found.index + whole.length;
  }
  into.append(text.slice(at));
  return into;
}

function list(lines) {
  const [, , mark] = ITEM.exec(lines[0]);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) made.start = parseInt(mark, 10);
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found) inline(made.appendChild(element("li")), found[3]);
    else if (made.lastChild) inline(made.lastChild, ` ${line.trim()}`);
  }
  return made;
}

export function markdown(text) {
  const blocks = document.createDocumentFragment();
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const taken = [];
    if (fence) {
      for (at += 1; at < lines.length && !lines[at].trim().startsWith(fence[1]); at += 1) taken.push(lines[at]);
      at += 1;
      blocks.append(element("pre", element("code", taken.join("\n"))));
    } else if (/^#{1,6}\s/.test(line)) {
      blocks.append(inline(element("h3"), line.replace(/^#+\s+/, "")));
      at += 1;
    } else if (/^>\s?/.test(line)) {
      for (; at < lines.length && /^>\s?/.test(lines[at]); at += 1) taken.push(lines[at].replace(/^>\s?/, ""));
      blocks.append(inline(element("blockquote"), taken.join("\n")));
    } else if (ITEM.test(line)) {
      for (; at < lines.length && lines[at].trim() && !FENCE.test(lines[at]); at += 1) taken.push(lines[at]);
      blocks.append(list(taken));
    } else if (line.trim()) {
      for (; at < lines.length && lines[at].trim() && !FENCE.test(lines[at]); at += 1) taken.push(lines[at]);
      blocks.append(inline(element("p"), taken.join("\n")));
    } else {
      at += 1;
    }
  }
  return blocks;
}
