// The reader of /openapi.json: every operation with its fields, their bounds, and its statuses.

import { byId, element } from "./dom.js";

const MAX_DEPTH = 2; // of fields within fields that are spelled out

const resolve = (schema, root) => (schema.$ref ? resolve(schema.$ref.slice(2).split("/").reduce((at, name) => at[name], root), root) : schema);

/** What a schema accepts, in a few words. */
function words(schema, root, depth = 0) {
  schema = resolve(schema, root);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.filter((one) => one !== null).map((one) => JSON.stringify(one)).join(", ");
  if (schema.anyOf) {
    const found = schema.anyOf.filter((one) => one.type !== "null").map((one) => words(one, root, depth));
    return [...new Set(found)].join(" or ");
  }
  const kind = [schema.type ?? "any value"].flat().filter((one) => one !== "null").join(" or ");
  if (kind === "array") return `array of ${words(schema.items ?? {}, root, depth + 1)}${bound(schema, "Items", "")}`;
  if (kind === "object" && schema.properties && depth < MAX_DEPTH) return `{${Object.keys(schema.properties).join(", ")}}`;
  if (kind === "string") return `string${bound(schema, "Length", " characters")}`;
  const low = schema.minimum ?? schema.exclusiveMinimum;
  if (low === undefined && schema.maximum === undefined) return kind;
  const start = schema.exclusiveMinimum === undefined ? `${low ?? ""}` : `above ${low}`;
  return `${kind}, ${schema.maximum === undefined ? `from ${start}` : `${start} to ${schema.maximum}`}`;
}

function bound(schema, what, unit) {
  const [low, high] = [schema[`min${what}`], schema[`max${what}`]];
  if (high === undefined) return low ? `, at least ${low}${unit}` : "";
  return `, ${low ? `${low} to ` : "up to "}${high}${unit}`;
}

function table(head, rows) {
  const header = element("tr", {}, ...head.map((text) => element("th", { scope: "col", text })));
  const body = rows.map(([name, ...cells]) => element("tr", {},
    element("th", { scope: "row" }, element("code", { text: name })), ...cells.map((text) => element("td", { text }))));
  return element("div", { class: "wide", tabindex: "0" }, element("table", {}, element("thead", {}, header), element("tbody", {}, ...body)));
}

function example(method, path, operation, root) {
  const lines = [`curl ${method === "get" ? "" : `-X ${method.toUpperCase()} `}${location.origin}${path}`];
  if (operation.security === undefined && !root.security.some((one) => !Object.keys(one).length)) lines.push(`-H 'Authorization: Bearer KEY'`);
  if (operation.requestBody) {
    const { schema } = operation.requestBody.content["application/json"];
    const samples = { model: "MODEL", messages: [{ role: "user", content: "Hello" }], prompt: "Hello", max_tokens: 20, text: "Hello", tokens: [1, 2], session_id: "ID", target: "MODEL" };
    const body = Object.fromEntries((schema.required || []).map((name) => [name, samples[name] ?? null]));
    lines.push(`-H 'Content-Type: application/json'`, `-d '${JSON.stringify(body)}'`);
  }
  return element("pre", { tabindex: "0" }, element("code", { text: lines.join(" \\\n  ") }));
}

function show(path, method, operation, root) {
  const parts = [element("h3", { text: "Example" }), example(method, path, operation, root)];
  if (operation.parameters) {
    const rows = operation.parameters.map((one) => [one.name, one.in, one.description || words(one.schema, root)]);
    parts.push(element("h3", { text: "Parameters" }), table(["Name", "In", "Meaning"], rows));
  }
  if (operation.requestBody) {
    const { schema } = operation.requestBody.content["application/json"];
    const required = new Set(schema.required || []);
    const rows = Object.entries(schema.properties || {}).map(([name, one]) =>
      [name + (required.has(name) ? " *" : ""), words(one, root), resolve(one, root).description || ""]);
    if (rows.length) parts.push(element("h3", { text: "Body (* required)" }), table(["Field", "Accepts", "Meaning"], rows));
  }
  const statuses = Object.entries(operation.responses).map(([status, one]) => [status, one.description]);
  parts.push(element("h3", { text: "Statuses" }), table(["Status", "Meaning"], statuses));
  const title = element("summary", {}, element("span", { class: "method", text: method.toUpperCase() }), " ",
    element("code", { text: path }), ` ${operation.summary}`);
  return element("details", { class: "operation", id: operation.operationId }, title, ...parts);
}

function search(text) {
  const wanted = text.trim().toLowerCase();
  let count = 0;
  for (const one of document.querySelectorAll("details.operation")) {
    one.hidden = Boolean(wanted) && !one.textContent.toLowerCase().includes(wanted);
    count += !one.hidden;
  }
  for (const section of document.querySelectorAll("#operations section")) section.hidden = !section.querySelector("details:not([hidden])");
  byId("count").textContent = `${count} operations`;
}

const root = await (await fetch("/openapi.json")).json();
const groups = new Map();
for (const [path, operations] of Object.entries(root.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const [tag] = operation.tags;
    if (!groups.has(tag)) groups.set(tag, []);
    groups.get(tag).push(show(path, method, operation, root));
  }
}
byId("operations").replaceChildren(...[...groups].map(([tag, all]) => element("section", {}, element("h2", { text: tag }), ...all)));
byId("search").addEventListener("input", (event) => search(event.target.value));
search("");
if (location.hash) document.getElementById(location.hash.slice(1))?.setAttribute("open", "");
