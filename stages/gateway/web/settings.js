// Settings of requests: the fields of parameters are made from the bounds in /openapi.json.

import { byId, element } from "./dom.js";

const STORED = "starling.settings";
const FIRST = ["temperature", "top_p", "top_k", "max_tokens", "seed", "repetition_penalty", "frequency_penalty",
  "presence_penalty"];
// Set elsewhere on the page, or without a meaning for it.
const LEFT_OUT = new Set(["n", "stream", "logprobs", "top_logprobs", "max_completion_tokens", "echo",
  "add_generation_prompt", "continue_final_message", "store", "best_of"]);
const TEXTS = ["system", "stop-strings", "constraint", "constraint-text", "tools", "tool-choice"]; // ids of fields
const SHOWN_TOP = 5; // likeliest tokens that are asked for with the probabilities

const kinds = (schema) => [schema.type].flat();

function json(id, what) {
  const text = byId(id).value.trim();
  const problem = byId(id === "tools" ? "tools-error" : "constraint-error");
  problem.textContent = "";
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    problem.textContent = `${what}: ${error.message}`;
    throw new Error(problem.textContent);
  }
}

export class Settings {
  constructor() {
    this.stored = this.read();
    this.fields = new Map(); // by parameter: its field and schema
    this.isComplete = false; // the fields of all parameters are there, or the server does not describe them
    for (const id of TEXTS) {
      if (this.stored[id]) byId(id).value = this.stored[id];
      byId(id).addEventListener("input", () => this.store());
    }
    byId("probabilities").checked = Boolean(this.stored.probabilities);
    byId("probabilities").addEventListener("change", () => this.store());
    byId("constraint").addEventListener("change", () => this.showConstraint());
    byId("reset").addEventListener("click", () => this.reset());
    byId("model").addEventListener("change", () => this.store());
    this.showConstraint();
  }

  read() {
    try {
      return JSON.parse(localStorage.getItem(STORED)) || {};
    } catch {
      return {};
    }
  }

  store() {
    this.stored = { parameters: {}, model: byId("model").value, probabilities: byId("probabilities").checked };
    for (const id of TEXTS) this.stored[id] = byId(id).value;
    for (const [name, { field }] of this.fields) if (field.value !== "") this.stored.parameters[name] = field.value;
    try {
      localStorage.setItem(STORED, JSON.stringify(this.stored));
    } catch {
      // no room: the settings hold until the page is closed
    }
  }

  showConstraint() {
    byId("constraint-text").disabled = !["json_schema", "regex", "grammar"].includes(byId("constraint").value);
  }

  reset() {
    for (const { field } of this.fields.values()) field.value = "";
    byId("stop-strings").value = "";
    this.store();
  }

  /** Offer these models. */
  showModels(models) {
    const picker = byId("model");
    const wanted = picker.disabled ? this.stored.model : picker.value;
    picker.replaceChildren(...models.map(({ id, ready }) => element("option", { value: id, text: ready ? id : `${id} (not ready)` })));
    picker.disabled = !models.length;
    if (models.some(({ id }) => id === wanted)) picker.value = wanted;
  }

  /** Make a field for each parameter in the schema of the request's body. */
  showParameters(schema) {
    const names = Object.keys(schema.properties).filter((name) => !LEFT_OUT.has(name));
    const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
    const rows = names.sort((a, b) => rank(a) - rank(b)).map((name) => this.parameter(name, schema.properties[name]));
    byId("parameters").replaceChildren(...rows.filter(Boolean));
  }

  parameter(name, schema) {
    const kind = kinds(schema);
    const low = schema.minimum ?? schema.exclusiveMinimum;
    const id = `parameter-${name}`;
    let field;
    let bounds = "";
    if (kind.includes("number") || kind.includes("integer")) {
      const high = Math.min(schema.maximum, Number.MAX_SAFE_INTEGER);
      const min = Math.max(low, -Number.MAX_SAFE_INTEGER);
      const step = kind.includes("integer") ? "1" : "any";
      field = element("input", { id, type: "number", min, max: high, step, inputmode: "decimal", "aria-describedby": `${id}-text` });
      bounds = name === "seed" ? "any whole number" : `${schema.minimum === undefined ? "above " : ""}${min} to ${high}`;
    } else if (kind.includes("boolean")) {
      const options = ["", "true", "false"].map((value) => element("option", { value, text: value || "default" }));
      field = element("select", { id, "aria-describedby": `${id}-text` }, ...options);
    } else {
      return null;
    }
    field.value = this.stored.parameters?.[name] ?? "";
    field.addEventListener("input", () => {
      field.setCustomValidity(schema.exclusiveMinimum !== undefined && field.value !== "" && Number(field.value) <= low ? `must be above ${low}` : "");
      field.reportValidity();
      this.store();
    });
    this.fields.set(name, { field, schema });
    const text = [bounds, schema.description].filter(Boolean).join(". ");
    return element("div", { class: "parameter" }, element("label", { for: id, text: name }), field,
      element("p", { id: `${id}-text`, class: "note", text }));
  }

  system() {
    return byId("system").value.trim();
  }

  /** The fields of a request besides its messages. Throws an Error that says which setting is wrong. */
  request() {
    if (!byId("model").length) throw new Error("The server serves no model.");
    if (byId("model").disabled || !this.isComplete) throw new Error("The models and parameters have not come from the server yet; send again.");
    const request = { model: byId("model").value };
    for (const [name, { field }] of this.fields) {
      if (field.value === "" && !field.validity?.badInput) continue;
      if (!field.checkValidity()) {
        field.reportValidity();
        throw new Error(`${name}: ${field.validationMessage}`);
      }
      request[name] = field.tagName === "SELECT" ? field.value === "true" : Number(field.value);
    }
    const stops = byId("stop-strings").value.split("\n").filter(Boolean);
    if (stops.length) request.stop = stops;
    if (byId("probabilities").checked) Object.assign(request, { logprobs: true, top_logprobs: SHOWN_TOP });
    const tools = json("tools", "Tools");
    if (tools?.length) Object.assign(request, { tools, tool_choice: byId("tool-choice").value });
    const constraint = byId("constraint").value;
    const text = byId("constraint-text").value;
    if (constraint === "json_object") request.response_format = { type: "json_object" };
    else if (constraint === "json_schema") {
      const schema = json("constraint-text", "Schema");
      if (schema === undefined) throw new Error("The schema of the structured output is empty");
      request.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    } else if (constraint) request[constraint] = text;
    return request;
  }
}
