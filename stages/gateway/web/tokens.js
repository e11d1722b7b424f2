// The tokens of an answer with their probabilities: how they are stored, shown, and reached by keyboard.

import { byId, element } from "./dom.js";

const CLASSES = [0.9, 0.6, 0.3, 0.1]; // lower bounds of the probabilities of the classes p0, p1, ...; p4: less

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

/** Add the `logprobs.content` of an event to a message: entries `{text, logprob, top}` of whole characters. */
export function add(message, content) {
  message.tokens ??= [];
  for (const one of content) {
    const held = [...(message.held || []), ...one.bytes];
    const top = one.top_logprobs.map(({ token, logprob }) => [token, logprob]);
    let text = null;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(held));
    } catch {
      // the middle of a character: shown with the token that completes it
    }
    if (text === null && held.length < 4) {
      message.held = held;
    } else {
      delete message.held;
      message.tokens.push({ text: text ?? "\ufffd", logprob: one.logprob, top });
    }
  }
}

/** Append the tokens that are not shown yet and that `content` covers. Returns whether they are its text. */
export function show(target, message) {
  let at = 0;
  for (const [index, token] of message.tokens.entries()) {
    if (!message.content.startsWith(token.text, at)) return at >= message.content.length;
    at += token.text.length;
    if (index < target.children.length) continue;
    const probability = Math.exp(token.logprob);
    const level = CLASSES.findIndex((bound) => probability >= bound);
    const span = element("span", { class: `token p${level < 0 ? CLASSES.length : level}`, text: token.text });
    target.append(span);
  }
  return at >= message.content.length;
}

function describe(token) {
  const rows = token.top.map(([text, logprob]) => {
    const bar = element("span", { class: "bar" });
    bar.style.width = `${Math.max(1, 100 * Math.exp(logprob))}%`;
    return element("div", { class: text === token.text ? "choice taken" : "choice" },
      element("code", { text: JSON.stringify(text).slice(1, -1) || "(empty)" }),
      element("span", { class: "track" }, bar), element("span", { text: percent(logprob) }));
  });
  return [element("p", {}, element("code", { text: JSON.stringify(token.text) }), ` ${percent(token.logprob)}`), ...rows];
}

/** Hide the probabilities of the token that was pointed at. */
export function hide() {
  document.querySelector(".token.pointed")?.classList.remove("pointed");
  byId("probability").hidden = true;
}

/** Show a token's probabilities beside it. */
function point(span, token) {
  const tip = byId("probability");
  hide();
  tip.hidden = false;
  span.classList.add("pointed");
  tip.replaceChildren(...describe(token));
  const place = span.getBoundingClientRect();
  const below = place.bottom + tip.offsetHeight + 12 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - tip.offsetHeight - 6)}px`;
}

/** Let pointer and arrow keys show the probabilities of the tokens in `target`. */
export function bind(target, message) {
  const at = (span) => [...target.children].indexOf(span);
  target.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".token");
    if (span) point(span, message.tokens[at(span)]);
  });
  target.addEventListener("pointerleave", hide);
  target.addEventListener("blur", hide);
  target.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step || !target.children.length) return;
    event.preventDefault();
    const current = at(target.querySelector(".pointed"));
    const next = current < 0 ? 0 : Math.max(0, Math.min(target.children.length - 1, current + step));
    const token = message.tokens[next];
    target.children[next].scrollIntoView({ block: "nearest" });
    point(target.children[next], token);
    byId("announcer").textContent = `${token.text}: ${percent(token.logprob)}`;
  });
}
