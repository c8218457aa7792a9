// Calls of the server that this page came from. The key stays in this tab.

const KEY = "ktinject-key";
const dialog = document.getElementById("key");
let asking = null;

export class Refused extends Error {}

async function askForKey() {
  asking ??= new Promise((done) => {
    const secret = document.getElementById("secret");
    secret.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, secret.value);
      asking = null;
      done();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// The answer to a request; asks for a key where the server wants one. Throws Refused with what the server says.
export async function call(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    if (answer.status === 401) {
      await askForKey();
      continue;
    }
    const said = await answer.json().catch(() => null);
    throw new Refused(said?.error?.message ?? `The server answered ${answer.status}.`);
  }
}

export const json = async (path) => (await call(path)).json();

// The events of a stream as objects. An error in it is thrown.
export async function* events(path, body, signal) {
  const answer = await call(path, {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message ?? String(event.error));
      yield event;
    }
  }
}
