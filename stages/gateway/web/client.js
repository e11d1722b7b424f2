// Requests to the server: the API key, JSON, and streams that survive a lost connection.

const KEY = "starling.key"; // in sessionStorage: gone when the tab is closed
const RETRY_MS = [500, 1000, 2000, 4000, 8000]; // between attempts to resume; the last one repeats
const GIVE_UP_MS = 90_000; // without an event: a request that no client reads is cancelled after 60 s

export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer of the server with a status that is not a success. */
export class Refused extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message || `the server answered with the status ${status}`);
    this.status = status;
    this.code = error.code || "";
    this.param = error.param || "";
  }
}

function headers(more = {}) {
  return key.get() ? { Authorization: `Bearer ${key.get()}`, ...more } : more;
}

async function refusal(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // not JSON: the status says enough
  }
  return new Refused(response.status, body);
}

/** GET a JSON document. Throws `Refused`, but with `statuses` returns the body of these statuses too. */
export async function getJSON(path, statuses = []) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  if (!response.ok && !statuses.includes(response.status)) throw await refusal(response);
  return response.json();
}

/** GET a text, "" if there is none. */
export async function getText(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store" });
  return response.ok ? response.text() : "";
}

/** Cancel a request in flight. What it has sent stays. */
export async function cancel(id) {
  await fetch(`/v1/requests/${encodeURIComponent(id)}`, { method: "DELETE", headers: headers(), keepalive: true });
}

/** Split a body of server-sent events into `{id, data}`. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let id = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { id, data: data.join("\n") };
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).trimStart());
        } else if (line.startsWith("id:")) {
          id = line.slice(3).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const pause = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/**
 * Run a chat request to its end, over as many connections as that takes.
 *
 * run: `{key, body, lastId, requestId}`; the caller stores it, and with the stored values continues it after a reload.
 * on: `event(data, id)` for each event, `waiting(reason)` while there is no connection, `connected()`.
 * Throws `Refused` if the server refuses, and an Error if the request is lost.
 */
export async function stream(run, on, signal) {
  let failures = 0;
  let lastEvent = Date.now();
  while (!signal.aborted) {
    let response;
    try {
      const more = { "Content-Type": "application/json", "Idempotency-Key": run.key };
      if (run.lastId) more["Last-Event-ID"] = run.lastId;
      response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(more), body: run.body, signal });
    } catch (error) {
      if (signal.aborted) return;
      on.waiting("no connection to the server");
    }
    if (response && !response.ok) {
      const refused = await refusal(response);
      // While a stage restarts, a request that has begun waits; a new one is refused at once.
      if (!run.requestId || ![502, 503, 504].includes(refused.status)) throw refused;
      on.waiting(refused.message);
    } else if (response) {
      run.requestId = response.headers.get("X-Starling-Request") || run.requestId;
      on.connected();
      try {
        for await (const { id, data } of events(response.body)) {
          failures = 0;
          lastEvent = Date.now();
          if (data === "[DONE]") return;
          on.event(JSON.parse(data), id);
          if (id) run.lastId = id;
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof SyntaxError) throw error;
      }
      if (signal.aborted) return;
      on.waiting("the connection was lost");
    }
    if (Date.now() - lastEvent > GIVE_UP_MS) throw new Error("the server did not come back in time");
    await pause(RETRY_MS[Math.min(failures++, RETRY_MS.length - 1)], signal);
  }
}
