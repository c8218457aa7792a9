// The map of experts: a row for each layer that has some, a column for each expert.

import { entry, many, percent, ramp, tone } from "./draw.js";

const $ = (id) => document.getElementById(id);
const frame = $("map-frame"), canvas = $("map"), cursor = $("cursor"), cell = $("cell");

let rows = []; // { layer, count, weights, device, gpu: Set, uses: [] }
let columns = 0;
let at = null; // [row, column] under the cursor
let mode = "use";
let cache = null; // { uses, hits, fetches, bytes } where experts on a GPU are exchanged

const total = (row) => row.uses.reduce((sum, one) => sum + one, 0);

export function layers(plan) {
  rows = plan.layers.flatMap((one, layer) => (one.experts ? [{
    layer, count: one.experts.count, weights: one.experts.weights, device: one.device, operator: one.experts.operator,
    gpu: new Set(one.experts.on_gpu), uses: [],
  }] : []));
  columns = Math.max(0, ...rows.map((row) => row.count));
  const on = rows.reduce((sum, row) => sum + row.gpu.size, 0), all = rows.reduce((sum, row) => sum + row.count, 0);
  $("experts-note").textContent = rows.length
    ? `${many(all)} experts in ${rows.length} layers: ${many(on)} on a GPU, ${many(all - on)} on the CPU.`
    : "This model has no routed experts.";
  frame.hidden = !rows.length;
  $("map-end").textContent = columns ? `${columns - 1}` : "";
  draw();
  table();
}

export function uses(found, gpu, exchanged) {
  cache = exchanged ?? null;
  for (const row of rows) {
    row.uses = found?.[row.layer] ?? row.uses;
    if (gpu?.[row.layer]) row.gpu = new Set(gpu[row.layer]);
  }
  draw();
  if (at) say();
  if ($("layers").closest("details").open) table();
}

function size() {
  const width = frame.clientWidth, across = width / Math.max(1, columns);
  const down = Math.max(5, Math.min(18, across, 420 / Math.max(1, rows.length)));
  return [width, across, down];
}

export function draw() {
  if (!rows.length || !frame.clientWidth) return;
  const [width, across, down] = size(), scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(down * rows.length * scale);
  canvas.style.height = `${down * rows.length}px`;
  const paint = canvas.getContext("2d"), colour = ramp();
  const gap = across * scale > 4 ? Math.round(scale) : 0;
  // A few that are used far more than all others would leave the rest without a difference.
  const sorted = rows.flatMap((row) => row.uses).sort((a, b) => a - b);
  const most = Math.max(1, sorted[Math.floor(sorted.length * 0.99)] ?? 1);
  const gpu = tone("--gpu"), cpu = tone("--cpu");
  const edge = (at, size) => Math.round(at * size * scale); // cells end where pixels do
  rows.forEach((row, y) => {
    for (let x = 0; x < row.count; x += 1) {
      const used = Math.min(1, (row.uses[x] ?? 0) / most) ** 0.7;
      paint.fillStyle = mode === "use" ? colour(used) : row.gpu.has(x) ? gpu : cpu;
      const left = edge(x, across), top = edge(y, down);
      paint.fillRect(left, top, edge(x + 1, across) - left - gap, edge(y + 1, down) - top - gap);
    }
  });
  frame.setAttribute("aria-label", summary());
  legend();
  place();
}

function summary() {
  const shape = `Map of experts: ${rows.length} layers by ${columns} experts`;
  if (mode === "place") return `${shape}, coloured by where they are.`;
  const best = rows.flatMap((row) => row.uses.map((count, x) => [count, row.layer, x])).sort((a, b) => b[0] - a[0])[0];
  return best?.[0] ? `${shape}, coloured by use. Most used: layer ${best[1]}, expert ${best[2]}.` : `${shape}. None was used yet.`;
}

function legend() {
  if (mode === "place") {
    const hits = cache?.uses ? [`${percent(cache.hits / cache.uses)} of uses, ${many(cache.fetches)} fetched`] : [];
    $("map-legend").replaceChildren(entry("is-gpu", "on a GPU", ...hits), entry("is-cpu", "on the CPU"));
    return;
  }
  const line = document.createElement("li"), bar = document.createElement("canvas");
  bar.className = "ramp";
  bar.width = 84;
  bar.height = 10;
  bar.setAttribute("aria-hidden", "true");
  const paint = bar.getContext("2d"), colour = ramp();
  for (let x = 0; x < 84; x += 1) {
    paint.fillStyle = colour(x / 83);
    paint.fillRect(x, 0, 1, 10);
  }
  line.append("never", bar, "most often");
  const chosen = rows.reduce((sum, row) => sum + total(row), 0);
  const count = document.createElement("li");
  count.append("chosen ", Object.assign(document.createElement("b"), { textContent: many(chosen) }), " times");
  $("map-legend").replaceChildren(line, count);
}

function place() {
  cursor.hidden = !at;
  if (!at) return;
  const [, across, down] = size(), [y, x] = at, least = Math.max(0, 9 - across) / 2, low = Math.max(0, 9 - down) / 2;
  Object.assign(cursor.style, {
    left: `${x * across - 2 - least}px`, top: `${y * down - 2 - low}px`,
    width: `${across + 3 + 2 * least}px`, height: `${down + 3 + 2 * low}px`,
  });
}

function say() {
  const [y, x] = at, row = rows[y], count = row.uses[x] ?? 0, all = total(row);
  const share = all ? `, ${percent(count / all)} of its layer` : "";
  cell.textContent = `Layer ${row.layer}, expert ${x}: ${row.gpu.has(x) ? "on a GPU" : "on the CPU"} as ${row.weights}; `
    + `chosen ${many(count)} times${share}.`;
}

function move(y, x) {
  const row = Math.min(rows.length - 1, Math.max(0, y));
  at = [row, Math.min(rows[row].count - 1, Math.max(0, x))];
  place();
  say();
}

function table() {
  $("layers").replaceChildren(...rows.map((row) => {
    const best = row.uses.map((count, x) => [count, x]).filter(([count]) => count).sort((a, b) => b[0] - a[0]).slice(0, 4);
    const line = document.createElement("tr");
    const values = [row.gpu.size, row.count - row.gpu.size, row.weights, best.map(([count, x]) => `${x} (${many(count)})`).join(", ") || "–"];
    const name = Object.assign(document.createElement("th"), { scope: "row", textContent: row.layer });
    line.append(name, ...values.map((value) => Object.assign(document.createElement("td"), { textContent: value })));
    return line;
  }));
}

function pointed(event) {
  const box = canvas.getBoundingClientRect(), [, across, down] = size();
  move(Math.floor((event.clientY - box.top) / down), Math.floor((event.clientX - box.left) / across));
}

frame.addEventListener("pointermove", pointed);
frame.addEventListener("pointerdown", pointed);
frame.addEventListener("keydown", (event) => {
  const [y, x] = at ?? [0, -1];
  const next = { ArrowRight: [y, x + 1], ArrowLeft: [y, x - 1], ArrowDown: [y + 1, Math.max(0, x)],
    ArrowUp: [y - 1, Math.max(0, x)], Home: [y, 0], End: [y, columns] }[event.key];
  if (!next || !rows.length) return;
  event.preventDefault();
  move(...next);
});
frame.addEventListener("blur", () => { at = null; place(); });
frame.addEventListener("pointerleave", () => { if (document.activeElement !== frame) { at = null; place(); } });
$("layers").closest("details").addEventListener("toggle", table);
document.querySelectorAll('input[name="map"]').forEach((one) => one.addEventListener("change", () => { mode = one.value; draw(); }));
new ResizeObserver(draw).observe(frame);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
