// Starts the page, and binds its buttons and keys.

import { Chat } from "./chat.js";
import * as client from "./client.js";
import * as conversations from "./conversations.js";
import { byId, element } from "./dom.js";
import { ServerView } from "./server.js";
import { Settings } from "./settings.js";
import * as tokens from "./tokens.js";

const CURRENT = "starling.current"; // in sessionStorage: the conversation of this tab
const CHECK_MS = 10_000; // how often the state of the server is asked for
const isNarrow = () => matchMedia("(max-width: 800px)").matches;

const settings = new Settings();
const server = new ServerView();
const prompt = byId("prompt");
const chat = new Chat(settings, { changed, running, unauthorized: () => askKey("This server asks for an API key.") });

function changed() {
  sessionStorage.setItem(CURRENT, chat.conversation.id);
  byId("conversation-list").replaceChildren(...conversations.list().map(({ id, title }) => {
    const isCurrent = id === chat.conversation.id;
    const select = element("button", { class: "select", text: title, "aria-current": isCurrent ? "true" : null, onclick: () => open(id) });
    const remove = element("button", { class: "icon", text: "\u00d7", "aria-label": `Delete ${title}`, onclick: () => forget(id) });
    return element("li", {}, select, remove);
  }));
}

function running(isRunning) {
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
}

function open(id) {
  const found = id && conversations.load(id);
  chat.open(found || conversations.create());
  if (found) byId("system").value = found.system || "";
  changed();
  drawer("conversations", false);
  view(false);
  if (!isNarrow()) prompt.focus();
}

function forget(id) {
  if (!confirm("Delete this conversation from this browser?")) return;
  if (id === chat.conversation.id) {
    chat.stop();
    chat.detach();
    chat.conversation.messages = [];
    conversations.remove(id);
    open(null);
  } else {
    conversations.remove(id);
    changed();
  }
}

function view(isServer) {
  byId("chat-view").hidden = isServer;
  tokens.hide();
  byId("view-server").setAttribute("aria-pressed", String(isServer));
  server.show(isServer);
}

/** Open or close the list of conversations (a drawer on narrow screens) or the settings. */
function drawer(id, isOpen) {
  const panel = byId(id);
  if (id === "settings") panel.hidden = !isOpen;
  else panel.classList.toggle("open", isOpen);
  byId(`open-${id}`).setAttribute("aria-expanded", String(isOpen));
  if (isOpen) panel.querySelector("button, textarea")?.focus();
}

function askKey(note) {
  byId("key-note").textContent = note;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, innerHeight / 3)}px`;
}

function submit() {
  const text = prompt.value;
  if (chat.send(text)) {
    prompt.value = "";
    grow();
  }
}

function save(name, type, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

async function check() {
  const shown = byId("state");
  const key = client.key.get();
  try {
    const { data } = await client.getJSON("/v1/models");
    settings.showModels(data);
    const isReady = data.some(({ ready }) => ready);
    shown.textContent = isReady ? "ready" : "starting";
    shown.className = `state ${isReady ? "up" : "starting"}`;
  } catch (error) {
    if (client.key.get() !== key) return; // a late answer: the check with the new key shows what holds
    shown.textContent = error.status === 401 ? "no key" : "no connection";
    shown.className = "state down";
    if (error.status === 401) askKey(key ? "The server does not know this key." : "This server asks for an API key.");
  }
}

async function start() {
  byId("bound").textContent = conversations.MAX_CONVERSATIONS;
  open(sessionStorage.getItem(CURRENT));
  setInterval(() => document.hidden || byId("key-dialog").open || check(), CHECK_MS);
  const [document_] = await Promise.all([client.getJSON("/openapi.json").catch(() => null), check()]);
  settings.isComplete = true;
  if (!document_) return;
  const body = document_.paths["/v1/chat/completions"].post.requestBody;
  settings.showParameters(body.content["application/json"].schema);
  const metrics = Object.entries(document_.paths).find(([, one]) => one.get?.responses[200]?.content?.["text/plain"]);
  server.metricsPath = metrics ? metrics[0] : "";
}

byId("composer").addEventListener("submit", (event) => (event.preventDefault(), submit()));
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    submit();
  } else if (event.key === "ArrowUp" && !prompt.value && !chat.isRunning) {
    event.preventDefault();
    chat.editLast();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.isRunning) chat.stop();
  else if (chat.editing) chat.cancelEdit();
  else if (isNarrow()) for (const id of ["conversations", "settings"]) drawer(id, false);
});
byId("stop").addEventListener("click", () => chat.stop());
byId("cancel-edit").addEventListener("click", () => (chat.cancelEdit(), prompt.focus()));
byId("new").addEventListener("click", () => open(null));
byId("view-server").addEventListener("click", () => view(byId("server-view").hidden));
byId("open-conversations").addEventListener("click", () => drawer("conversations", !byId("conversations").classList.contains("open")));
byId("open-settings").addEventListener("click", () => drawer("settings", byId("settings").hidden));
byId("close-settings").addEventListener("click", () => (drawer("settings", false), byId("open-settings").focus()));
byId("export-json").addEventListener("click", () => save("conversation.json", "application/json", JSON.stringify(chat.conversation, null, 2)));
byId("export-text").addEventListener("click", () => save("conversation.md", "text/markdown", conversations.markdown(chat.conversation)));
byId("change-key").addEventListener("click", () => askKey("The key for requests of this tab."));
byId("cancel-key").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  client.key.set(byId("key").value.trim());
  byId("key").value = "";
  check();
});

start();
