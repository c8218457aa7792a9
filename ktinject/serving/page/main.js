import * as chat from "./chat.js";
import * as inside from "./inside.js";
import { json } from "./server.js";

const $ = (id) => document.getElementById(id);

document.querySelectorAll("[data-show]").forEach((button) => button.addEventListener("click", () => {
  document.body.dataset.view = button.dataset.show;
  document.querySelectorAll("[data-show]").forEach((one) => one.setAttribute("aria-pressed", one === button));
}));

try {
  const plan = await json("/plan");
  $("model").textContent = plan.model;
  document.title = `${plan.model} · ktinject`;
  const devices = plan.devices.map((one) => (one.name === "cpu" ? "CPU" : one.name)).join(" and ");
  $("about").textContent = `${plan.layers.length} layers on ${devices}, ${plan.context.toLocaleString("en")} tokens of context`;
  chat.start(plan);
  inside.start(plan);
} catch (error) {
  $("about").textContent = `The server does not say what it serves: ${error.message}`;
  $("state").dataset.is = "gone";
}
$("question").focus();
