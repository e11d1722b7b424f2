// Conversations in localStorage, one entry each and an index, within bounds: the oldest make room for new ones.

export const MAX_CONVERSATIONS = 100;
const MAX_CHARACTERS = 4_000_000; // of all; browsers allow 5 million or more for a site
const INDEX = "starling.conversations"; // [{id, title, changed, size}], the latest first
const entry = (id) => `starling.conversation.${id}`;

function parse(text, fallback) {
  try {
    return text ? JSON.parse(text) : fallback;
  } catch {
    return fallback;
  }
}

/** The index. */
export function list() {
  const found = parse(localStorage.getItem(INDEX), []);
  return Array.isArray(found) ? found : [];
}

/** The conversation with this id; null: there is none. */
export function load(id) {
  const found = parse(localStorage.getItem(entry(id)), null);
  return found && Array.isArray(found.messages) ? found : null;
}

/** A new conversation, which is stored with its first message. */
export function create() {
  return { id: crypto.getRandomValues(new Uint32Array(4)).join("-"), title: "", messages: [], system: "" };
}

/** Remove a conversation. */
export function remove(id) {
  localStorage.removeItem(entry(id));
  localStorage.setItem(INDEX, JSON.stringify(list().filter((one) => one.id !== id)));
}

/** Store a conversation as the latest. If it does not fit alone, its token probabilities are left out. */
export function save(conversation) {
  if (!conversation.messages.length) return;
  const first = conversation.messages.find((one) => one.role === "user");
  conversation.title = (first?.content || "Chat").replace(/\s+/g, " ").trim().slice(0, 60) || "Chat";
  let text = JSON.stringify(conversation);
  if (text.length > MAX_CHARACTERS / 2) text = JSON.stringify(conversation, (name, value) => (name === "tokens" ? undefined : value));
  const others = list().filter((one) => one.id !== conversation.id);
  const mine = { id: conversation.id, title: conversation.title, changed: Date.now(), size: text.length };
  let total = text.length;
  let kept = others.filter((one, at) => (total += one.size || 0) <= MAX_CHARACTERS && at < MAX_CONVERSATIONS - 1);
  for (;;) {
    for (const one of others) if (!kept.includes(one)) localStorage.removeItem(entry(one.id));
    try {
      localStorage.setItem(entry(conversation.id), text);
      localStorage.setItem(INDEX, JSON.stringify([mine, ...kept]));
      return;
    } catch (error) {
      if (!kept.length) throw new Error("this browser has no room for the conversation; export it");
      kept = kept.slice(0, -1);
    }
  }
}

/** A conversation as Markdown. */
export function markdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system) parts.push(`**System**\n\n${conversation.system}`);
  for (const message of conversation.messages) {
    const name = { user: "User", assistant: "Assistant", tool: "Tool result" }[message.role] || message.role;
    const calls = (message.tool_calls || []).map((call) => `\`${call.function.name}(${call.function.arguments})\``);
    parts.push([`**${name}**`, message.content, ...calls].filter(Boolean).join("\n\n"));
  }
  return `${parts.join("\n\n")}\n`;
}
