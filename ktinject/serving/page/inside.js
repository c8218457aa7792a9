// What the model does now. The server counts only while this asks, and this asks only while it is seen.

import { latest } from "./chat.js";
import { bytes, entry, many, percent, shape, spark, stacked, time } from "./draw.js";
import * as map from "./map.js";
import { json } from "./server.js";

const $ = (id) => document.getElementById(id);
const PERIOD_MS = 1000, SEEN = 60;

const rates = [];
let before = null;

export function start(plan) {
  map.layers(plan);
  $("memory").replaceChildren(...plan.devices.map(device));
  tick();
}

function isSeen() {
  return !document.hidden && $("live").checked;
}

async function tick() {
  const began = performance.now();
  if (isSeen()) {
    try {
      show(await json("/activity"));
    } catch {
      $("state").dataset.is = "gone";
      $("state").textContent = "The server does not answer";
      before = null;
    }
  } else {
    before = null;
  }
  setTimeout(tick, Math.max(100, PERIOD_MS - (performance.now() - began)));
}

function show(now) {
  if (before && now.clock > before.clock) {
    rates.push(Math.max(0, now.generated - before.generated) / (now.clock - before.clock));
    rates.splice(0, rates.length - SEEN);
  }
  before = now;
  const rate = rates.at(-1);
  $("rate").textContent = rate === undefined ? "–" : rate >= 100 || !rate ? Math.round(rate) : rate.toFixed(1);
  spark($("spark"), rates, SEEN);
  $("first").textContent = latest.first === null ? "–" : time(latest.first);
  $("running").textContent = now.running;
  $("waiting").textContent = now.waiting;
  $("held").textContent = now.held ? many(now.held) : "–";
  $("state").dataset.is = now.running ? "busy" : "idle";
  $("state").textContent = now.running ? "Writing" : "Idle";
  map.uses(now.uses, now.on_gpu, now.cache);
  if (now.step) step(now.step);
}

function parts(found) {
  const rest = found.device === "cpu" ? ["is-rest", "Attention, sampling, the rest"]
    : ["is-gpu", found.handoff === null ? "GPU and handoff" : "GPU"];
  const all = [["is-cpu", "Experts on the CPU", found.cpu_experts], [...rest, found.rest]];
  if (found.handoff !== null) all.push(["is-way", "Handoff", found.handoff]);
  return all.map(([kind, label, seconds]) => [kind, label, seconds, seconds / found.seconds]);
}

function step(found) {
  $("step-none").hidden = true;
  $("step").hidden = false;
  const rows = found.rows === 1 ? "one text" : `${found.rows} texts`;
  $("step-length").textContent = `${time(found.seconds)}, ${rows}; median of ${found.steps}`;
  const all = parts(found);
  stacked($("shares"), all.map(([kind, label, seconds, share]) => [kind, share, `${label}: ${time(seconds)}`]));
  $("shares").setAttribute("aria-label", all.map(([, label, seconds, share]) => `${label}: ${time(seconds)}, ${percent(share)}`).join(". "));
  $("legend").replaceChildren(...all.map(([kind, label, seconds, share]) => entry(kind, label, `${percent(share)} · ${time(seconds)}`)));
  lanes(found);
}

function lanes(found) {
  const end = Math.max(...found.latest.map(([, , stop]) => stop)), scale = 400 / end;
  const rest = found.device === "cpu" ? "is-rest" : "is-gpu";
  const pieces = [];
  let at = 0;
  for (const [layer, from, to] of found.latest) {
    pieces.push(shape("rect", { x: at * scale, y: 34, width: Math.max(0.4, (from - at) * scale - 0.4), height: 28, rx: 1, class: rest }));
    const box = shape("rect", { x: from * scale, y: 0, width: Math.max(0.8, (to - from) * scale - 0.4), height: 28, rx: 1, class: "is-cpu" });
    box.append(Object.assign(shape("title", {}), { textContent: `Layer ${layer}: ${time(to - from)}` }));
    pieces.push(box);
    at = to;
  }
  $("lanes").replaceChildren(...pieces);
  $("lanes").setAttribute("aria-label", `The latest step took ${time(end)}: experts of ${found.latest.length} layers on the CPU above, what lies between them below.`);
  $("lanes-end").textContent = time(end);
}

function device(found) {
  const made = Object.assign(document.createElement("div"), { className: "device" });
  const row = Object.assign(document.createElement("p"), { className: "row" });
  const whole = found.limit ?? found.weights + found.workspace;
  const name = found.name === "cpu" ? "RAM" : found.name;
  row.append(Object.assign(document.createElement("span"), { textContent: name }),
    Object.assign(document.createElement("span"), { textContent: `${bytes(found.weights)} of ${bytes(whole)}` }));
  const bar = Object.assign(document.createElement("div"), { className: "bar" });
  const kind = found.name === "cpu" ? "is-cpu" : "is-gpu";
  stacked(bar, [[kind, found.weights, "weights"], ["is-way", found.workspace, "workspace"],
    ["is-free", Math.max(0, whole - found.weights - found.workspace), "free for requests"]]);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `${name}: ${bytes(found.weights)} of weights and ${bytes(found.workspace)} of workspace, of ${bytes(whole)}.`);
  const list = Object.assign(document.createElement("ul"), { className: "legend" });
  list.append(entry(kind, "weights", bytes(found.weights)), entry("is-way", "workspace", bytes(found.workspace)));
  if (found.cache_per_token) list.append(entry("is-free", "cache, a token", bytes(found.cache_per_token)));
  made.append(row, bar, list);
  return made;
}
