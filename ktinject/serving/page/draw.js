// Small pictures from numbers.

export const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const SVG = "http://www.w3.org/2000/svg";

export function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at += 1) count /= 1024;
  return `${count >= 100 || at === 0 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
}

export function time(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 1e-3) return `${(seconds * 1e3).toFixed(seconds >= 0.1 ? 0 : 1)} ms`;
  return `${Math.round(seconds * 1e6)} µs`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
export const many = (count) => count.toLocaleString("en");

// A line over [width, height], with the greatest value at its top.
export function spark(svg, values, most) {
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const top = Math.max(1, ...values) * 1.08;
  const x = (at) => width - (values.length - 1 - at) * (width / (most - 1));
  const points = values.map((value, at) => `${x(at).toFixed(1)},${(height - 1 - (value / top) * (height - 4)).toFixed(1)}`);
  const base = shape("line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5, class: "base" });
  if (points.length < 2) return svg.replaceChildren(base);
  const area = `${x(0)},${height} ${points.join(" ")} ${x(values.length - 1)},${height}`;
  return svg.replaceChildren(base, shape("polygon", { points: area, class: "area" }),
    shape("polyline", { points: points.join(" "), class: "line" }));
}

// Parts side by side: [class, share of the whole, what it is].
export function stacked(into, parts) {
  into.replaceChildren(...parts.filter(([, share]) => share > 0).map(([kind, share, title]) => {
    const made = document.createElement("span");
    made.className = kind;
    made.style.flex = `${share} 1 0`;
    made.title = title;
    return made;
  }));
}

// One entry: a colour, what it means, and a value.
export function entry(kind, label, value = "") {
  const made = document.createElement("li");
  const dot = document.createElement("span");
  dot.className = `dot ${kind}`;
  made.append(dot, `${label} `);
  if (value) made.append(Object.assign(document.createElement("b"), { textContent: value }));
  return made;
}

function channels(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

// 0 … 1 → a colour of the heat ramp.
export function ramp() {
  const stops = [0, 1, 2, 3].map((number) => channels(tone(`--heat-${number}`)));
  return (share) => {
    const at = Math.min(2.999, Math.max(0, share * 3)), low = Math.floor(at);
    return `rgb(${stops[low].map((from, i) => Math.round(from + (stops[low + 1][i] - from) * (at - low))).join(" ")})`;
  };
}
