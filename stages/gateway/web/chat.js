// The conversation: sending, streaming, stopping, editing, and continuing what a reload interrupted.

import * as client from "./client.js";
import * as conversations from "./conversations.js";
import { byId } from "./dom.js";
import { MessageView } from "./message.js";
import * as tokens from "./tokens.js";

const SAVE_MS = 400; // while an answer is streamed

/** One per page. `settings`: `request()` and `model()`. `on`: `changed()`, `unauthorized()`, `running(flag)`. */
export class Chat {
  constructor(settings, on) {
    this.settings = settings;
    this.on = on;
    this.views = [];
    this.controller = null; // of the running stream
    this.editing = null; // `{at, draft}`: the message that the next one replaces, and the text that was in the field
    this.open(conversations.create());
    addEventListener("pagehide", () => this.save());
  }

  get isRunning() {
    return this.controller !== null;
  }

  /** Show a conversation, and continue an answer that was interrupted. */
  open(conversation) {
    this.detach();
    this.cancelEdit();
    this.conversation = conversation;
    this.draw();
    const last = conversation.messages.at(-1);
    if (last?.run) this.run(last);
  }

  /** Leave a running answer as it is: the server continues it for a minute. */
  detach() {
    if (!this.controller) return;
    this.save();
    this.controller.abort();
    this.controller = null;
    this.on.running(false);
  }

  draw() {
    const { messages } = this.conversation;
    this.views = messages.map((message, at) => new MessageView(message, {
      edit: () => this.edit(at),
      again: () => this.regenerate(at),
      answerCalls: (results) => this.answerCalls(results),
    }));
    tokens.hide(); // of a token that goes
    byId("messages").replaceChildren(...this.views.map((view) => view.root));
    byId("empty").hidden = messages.length > 0;
    if (!messages.at(-1)?.run) this.views.at(-1)?.update(true);
    this.scroll(true);
  }

  scroll(always) {
    const box = byId("scroll");
    if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  }

  save() {
    try {
      conversations.save(this.conversation);
    } catch (error) {
      byId("problem").textContent = error.message;
    }
    this.on.changed();
  }

  /** Send a user's text. */
  send(text) {
    if (this.isRunning || !text.trim()) return false;
    const removed = this.editing ? this.conversation.messages.splice(this.editing.at) : [];
    if (this.answer({ role: "user", content: text })) return true;
    this.conversation.messages.push(...removed);
    return false;
  }

  /** Send the results of the calls in the last message. */
  answerCalls(results) {
    const calls = this.conversation.messages.at(-1).tool_calls;
    this.answer(...calls.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: results[at] })));
  }

  /** Generate the answer at `index` again. */
  regenerate(index) {
    if (this.isRunning) return;
    this.cancelEdit();
    const removed = this.conversation.messages.splice(index);
    if (!this.answer()) this.conversation.messages.push(...removed);
  }

  /** Put a user's message back into the field; it and what follows are replaced when it is sent. */
  edit(index) {
    if (this.isRunning) return;
    const field = byId("prompt");
    this.editing = { at: index, draft: this.editing ? this.editing.draft : field.value };
    this.setField(this.conversation.messages[index].content);
    this.showEdit();
    field.focus();
  }

  /** Leave the conversation as it is, and put the draft back that the edited message replaced. */
  cancelEdit() {
    if (!this.editing) return;
    this.setField(this.editing.draft);
    this.editing = null;
    this.showEdit();
  }

  setField(text) {
    byId("prompt").value = text;
    byId("prompt").dispatchEvent(new Event("input"));
  }

  showEdit() {
    byId("editing").hidden = !this.editing;
    for (const [at, view] of this.views.entries()) view.root.classList.toggle("replaced", Boolean(this.editing) && at >= this.editing.at);
  }

  /** Edit the last message of the user. */
  editLast() {
    const at = this.conversation.messages.findLastIndex((message) => message.role === "user");
    if (at >= 0) this.edit(at);
  }

  requestMessages() {
    const sent = this.conversation.messages.filter((message) => message.role !== "assistant" || message.content || message.tool_calls);
    const messages = sent.map(({ role, content, tool_calls, tool_call_id }) => ({
      role, content: content || (tool_calls ? null : ""),
      ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id }),
    }));
    return this.conversation.system ? [{ role: "system", content: this.conversation.system }, ...messages] : messages;
  }

  /** Add messages and generate an answer to them. Returns whether the settings allow it. */
  answer(...added) {
    let request;
    byId("problem").textContent = "";
    try {
      request = this.settings.request();
    } catch (error) {
      byId("problem").textContent = error.message;
      return false;
    }
    this.editing = null;
    this.showEdit();
    this.conversation.system = this.settings.system();
    this.conversation.messages.push(...added);
    const body = { ...request, messages: this.requestMessages(), stream: true, stream_options: { include_usage: true } };
    const key = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const run = { key, body: JSON.stringify(body), lastId: "", requestId: "" };
    const message = { role: "assistant", content: "", started: Date.now(), run };
    this.conversation.messages.push(message);
    this.draw();
    this.scroll(true);
    this.save();
    this.run(message);
    return true;
  }

  /** Stream an answer to its end. */
  async run(message) {
    const controller = (this.controller = new AbortController());
    const view = this.views[this.conversation.messages.indexOf(message)];
    const { conversation } = this;
    let saved = Date.now();
    this.on.running(true);
    byId("announcer").textContent = "The answer is being generated.";
    const show = () => {
      if (conversation !== this.conversation) return;
      view.update();
      this.scroll(false);
    };
    try {
      await client.stream(message.run, {
        event: (data, id) => {
          this.take(message, data);
          if (id) message.run.lastId = id; // stored with the text that it stands for
          show();
          if (Date.now() - saved > SAVE_MS) {
            saved = Date.now();
            this.save();
          }
        },
        waiting: (reason) => {
          message.waiting = `${reason}: waiting to continue`;
          show();
        },
        connected: () => {
          delete message.waiting;
          show();
        },
      }, controller.signal);
    } catch (error) {
      message.error = error.message;
      if (error.status === 401) this.on.unauthorized();
    }
    if (this.controller !== controller) return; // another conversation was opened meanwhile
    this.finish(message, view, controller.signal.aborted);
  }

  finish(message, view, isStopped) {
    this.controller = null;
    delete message.waiting;
    delete message.held;
    if (isStopped) {
      message.stopped = true;
      if (message.run.requestId) client.cancel(message.run.requestId).catch(() => {});
    }
    delete message.run;
    view.update(true);
    this.scroll(false);
    this.save();
    this.on.running(false);
    byId("announcer").textContent = message.error || (isStopped ? "Stopped." : `The answer is complete. ${view.body.textContent}`);
  }

  /** Add an event to the message. */
  take(message, data) {
    if (data.error) message.error = data.error.message;
    if (data.usage) message.usage = data.usage;
    const choice = data.choices?.[0];
    if (!choice) return;
    const delta = choice.delta || {};
    if (delta.content || delta.reasoning || delta.tool_calls || choice.logprobs) {
      message.first ??= Date.now();
      message.last = Date.now();
    }
    if (delta.reasoning) message.reasoning = (message.reasoning || "") + delta.reasoning;
    if (delta.content) message.content += delta.content;
    for (const { index, id, function: part } of delta.tool_calls || []) {
      message.tool_calls ??= [];
      const call = (message.tool_calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
      call.function.name += part.name || "";
      call.function.arguments += part.arguments || "";
    }
    if (choice.logprobs?.content) tokens.add(message, choice.logprobs.content);
    if (choice.finish_reason) message.finish = choice.finish_reason;
  }

  /** End the running answer, here and on the server; its text so far stays. */
  stop() {
    this.controller?.abort();
  }
}
