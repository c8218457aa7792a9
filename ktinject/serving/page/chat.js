// The conversation: what is asked, the answer while it is written, and what a screen reader hears of it.

import { events, Refused } from "./server.js";
import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log"), question = $("question"), said = $("said");
const DRAW_MS = 60;

let about = { model: "", chat: true, most: 512 };
let messages = [];
let running = null; // the AbortController of an answer

export const latest = { first: null };

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function turn(kind, who) {
  $("empty").hidden = true;
  const made = document.createElement("article");
  made.className = `turn ${kind}`;
  made.innerHTML = '<h3 class="who"></h3><div class="text"></div>';
  made.querySelector(".who").textContent = who;
  log.append(made);
  log.scrollTop = log.scrollHeight;
  return made;
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  $("send").disabled = !question.value.trim();
}

function number(id) {
  const value = $(id).value.trim();
  return value === "" ? undefined : Number(value);
}

function request() {
  const body = {
    model: about.model, stream: true, stream_options: { include_usage: true },
    temperature: number("temperature"), max_tokens: number("most"),
  };
  if (!about.chat) return ["/v1/completions", { ...body, prompt: messages.map((one) => one.content).join("") }];
  const system = $("system").value.trim();
  const first = system ? [{ role: "system", content: system }] : [];
  return ["/v1/chat/completions", { ...body, messages: [...first, ...messages] }];
}

// Hands whole sentences to a screen reader, which pieces of words would only disturb.
class Speaker {
  at = 0;

  hear(text, isDone) {
    const rest = text.slice(this.at);
    const end = isDone ? rest.length : rest.search(/[.!?:]\s[^.!?]*$|\n[^\n]*$/) + 1;
    if (end <= 0) return;
    this.at += end;
    said.append(Object.assign(document.createElement("span"), { textContent: `${rest.slice(0, end)} ` }));
  }
}

function foot(place, text, content) {
  const made = document.createElement("div");
  made.className = "foot";
  made.append(text);
  const copy = Object.assign(document.createElement("button"), { type: "button", className: "plain", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(content);
    copy.textContent = "Copied";
    setTimeout(() => { copy.textContent = "Copy"; }, 1500);
  });
  made.append(copy);
  place.append(made);
}

async function answer() {
  const place = turn("model writing", about.model);
  place.setAttribute("aria-busy", "true");
  const text = place.querySelector(".text"), speaker = new Speaker();
  said.replaceChildren();
  let content = "", thinking = "", usage = null, ended = "", drawn = 0, first = null, problem = "";
  const began = performance.now();

  function draw() {
    const follows = isAtEnd();
    if (thinking) {
      place.querySelector(".thinking")?.remove();
      const box = Object.assign(document.createElement("details"), { className: "thinking", open: !content });
      const title = Object.assign(document.createElement("summary"), { textContent: "Thinking" });
      box.append(title, Object.assign(document.createElement("p"), { textContent: thinking }));
      text.before(box);
    }
    text.replaceChildren(markdown(content));
    speaker.hear(content, false);
    drawn = performance.now();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const [path, body] = request();
    for await (const event of events(path, body, running.signal)) {
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      const thought = choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "";
      if ((piece || thought) && first === null) {
        first = (performance.now() - began) / 1000;
        latest.first = first;
      }
      content += piece;
      thinking += thought;
      usage = event.usage ?? usage;
      ended = choice?.finish_reason ?? ended;
      if (performance.now() - drawn > DRAW_MS) draw();
    }
  } catch (error) {
    if (error.name === "AbortError") ended = "stopped";
    else problem = error instanceof Refused ? error.message : "The server cannot be reached.";
  }
  draw();
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  place.classList.remove("writing");
  place.removeAttribute("aria-busy");
  speaker.hear(content, true);
  if (problem) {
    const line = Object.assign(document.createElement("p"), { className: "problem", textContent: problem });
    line.setAttribute("role", "alert");
    place.append(line);
  }
  if (content) messages.push({ role: "assistant", content });
  else if (problem) question.value = messages.pop()?.content ?? "";
  fit();
  const seconds = (performance.now() - began) / 1000;
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (first !== null) parts.push(`first after ${first.toFixed(2)} s`);
  if (usage && usage.completion_tokens > 1 && first !== null) {
    parts.push(`${((usage.completion_tokens - 1) / Math.max(1e-3, seconds - first)).toFixed(1)} tokens/s`);
  }
  if (ended === "length") parts.push("cut at the limit of tokens");
  if (ended === "stopped") parts.push("stopped");
  if (content) foot(place, parts.join(" · "), content);
  said.append(` ${problem || `Answer ended: ${parts.join(", ")}.`}`);
  if (isAtEnd() || !content) log.scrollTop = log.scrollHeight;
  question.focus();
}

function ask() {
  const text = question.value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  turn("user", "You").querySelector(".text").textContent = text;
  question.value = "";
  fit();
  answer();
}

export function start(found) {
  about = found;
  $("most").max = found.most;
  $("most").value = Math.min(512, found.most);
  if (!found.chat) {
    $("system").closest("label").hidden = true;
    $("hint").textContent = "This model has no chat template: it goes on with your text.";
    question.placeholder = "A text to go on with";
  }
  fit();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("anew").addEventListener("click", () => {
  running?.abort();
  messages = [];
  log.querySelectorAll(".turn").forEach((one) => one.remove());
  $("empty").hidden = false;
  said.textContent = "A new conversation.";
  question.focus();
});
fit();
