// One message on the screen.

import { element, figure } from "./dom.js";
import * as tokens from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };

/** Text with its fenced code blocks set apart. */
function paragraphs(text) {
  return text.split(/^```([^\n`]*)\n([\s\S]*?)^```[^\S\n]*$/m).flatMap((part, at) => {
    if (at % 3 === 1) return [];
    if (at % 3 === 2) return [element("pre", { tabindex: "0" }, element("code", { text: part.replace(/\n$/, "") }))];
    return part ? [element("span", { text: part })] : [];
  });
}

function statistics(message) {
  const parts = [];
  const { started, first, last, usage } = message;
  if (usage) parts.push(`${figure(usage.completion_tokens)} tokens`);
  if (usage && last > first && usage.completion_tokens > 1) {
    parts.push(`${figure((1000 * (usage.completion_tokens - 1)) / (last - first), 1)} tokens/s`);
  }
  if (first) parts.push(`first token after ${figure((first - started) / 1000, 2)} s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens || 0;
    parts.push(`prompt of ${figure(usage.prompt_tokens)}${cached ? `, ${figure(cached)} from the cache` : ""}`);
  }
  if (message.finish === "length") parts.push("cut off at max_tokens");
  if (message.stopped) parts.push("stopped");
  return parts.join(" \u00b7 ");
}

/** The view of a message; call `update` after each change of it. `actions`: `edit`, `again` and `answerCalls`. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.reasoning = element("div", { class: "thoughts" });
    this.thought = element("details", { class: "reasoning", hidden: true }, element("summary", { text: "Reasoning" }), this.reasoning);
    this.body = element("div", { class: "body" });
    this.notes = element("p", { class: "statistics" });
    this.problem = element("p", { class: "error", hidden: true });
    this.calls = element("div", { class: "calls" });
    this.buttons = element("div", { class: "buttons" });
    this.root = element("li", { class: `message ${message.role}` },
      element("h2", { text: NAMES[message.role] || message.role }),
      this.thought, this.body, this.calls, this.problem, this.notes, this.buttons);
    this.update();
  }

  /** Show what has changed; `isLast`: it is the last message, and nothing is being generated. */
  update(isLast = false) {
    const message = this.message;
    this.root.classList.toggle("running", Boolean(message.run));
    this.showText();
    this.thought.hidden = !message.reasoning;
    if (message.reasoning) this.reasoning.textContent = message.reasoning;
    this.notes.textContent = message.role === "assistant" ? (message.waiting || statistics(message)) : "";
    this.problem.textContent = message.error || "";
    this.problem.hidden = !message.error;
    if (!message.run) this.showCalls(isLast);
    this.showButtons();
  }

  showText() {
    const message = this.message;
    if (message.role === "assistant" && message.tokens?.length) {
      if (!this.tokens) {
        this.tokens = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens of the answer" });
        tokens.bind(this.tokens, message);
        this.body.replaceChildren(this.tokens);
      }
      if (tokens.show(this.tokens, message) || message.run) return;
      this.tokens = null; // tool calls or hidden tokens: the tokens are not the text
    }
    if (message.run) {
      if (!this.text) this.body.replaceChildren((this.text = document.createTextNode("")));
      this.text.appendData(message.content.slice(this.text.length));
    } else {
      this.text = null;
      this.body.replaceChildren(...paragraphs(message.content));
    }
  }

  showCalls(isLast) {
    const calls = this.message.tool_calls || [];
    const inputs = [];
    this.calls.replaceChildren(...calls.map((call) => {
      const box = element("div", { class: "call" }, element("code", { text: `${call.function.name}(${call.function.arguments})` }));
      if (isLast) {
        const input = element("textarea", { rows: "2", "aria-label": `Result of ${call.function.name}`, placeholder: "Result" });
        inputs.push(input);
        box.append(input);
      }
      return box;
    }));
    if (isLast && calls.length) {
      const send = () => this.actions.answerCalls(inputs.map((input) => input.value));
      this.calls.append(element("button", { type: "button", text: "Send the results", onclick: send }));
    }
  }

  showButtons() {
    const { message, actions } = this;
    const wanted = message.run ? "" : message.role;
    if (this.shown === wanted) return;
    this.shown = wanted;
    const button = (text, action) => element("button", { type: "button", text, onclick: action });
    const copy = button("Copy", () => navigator.clipboard?.writeText(message.content));
    const sets = {
      user: [button("Edit", actions.edit)],
      assistant: [button("Regenerate", actions.again), ...(navigator.clipboard ? [copy] : [])],
    };
    this.buttons.replaceChildren(...(sets[wanted] || []));
  }
}
