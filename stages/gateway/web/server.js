// The live view of the server: /ready, the metrics, and with an administrator's key its tenants and drains.

import * as client from "./client.js";
import { byId, bytes, element, figure } from "./dom.js";
import { parse, sum } from "./metrics.js";

const PERIOD_MS = 2000;
const PAGES = ["leased", "cached", "free"];

export class ServerView {
  constructor() {
    this.metricsPath = "";
    this.before = null; // the sample before: `{time, series}`
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  /** Show or hide the view. */
  show(isShown) {
    byId("server-view").hidden = !isShown;
    if (isShown) byId("server-view").focus();
    this.refresh();
  }

  refresh() {
    clearTimeout(this.timer);
    this.timer = null;
    if (byId("server-view").hidden || document.hidden) return;
    this.sample().finally(() => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), PERIOD_MS);
    });
  }

  async sample() {
    let ready;
    let series;
    let state = null;
    try {
      ready = await client.getJSON("/ready", [503]);
      series = parse(this.metricsPath ? await client.getText(this.metricsPath) : "");
      state = await client.getJSON("/v1/admin/state").catch(() => null);
    } catch (error) {
      byId("server-note").textContent = `The gateway does not answer: ${error.message}`;
      return;
    }
    const now = { time: performance.now(), series };
    this.draw(ready, state, now);
    this.before = now;
  }

  /** The growth of a counter per second since the sample before; undefined: not known yet. */
  rate(now, name, labels) {
    const value = sum(now.series, name, labels);
    const before = this.before && sum(this.before.series, name, labels);
    if (value === undefined || before === undefined || before === null) return undefined;
    return Math.max(0, (1000 * (value - before)) / (now.time - this.before.time));
  }

  draw(ready, state, now) {
    const parts = [ready.ready ? "Ready for requests." : `Not ready: ${ready.reason}.`];
    parts.push(`Requests in flight: ${figure(ready.stages.gateway.in_flight)}.`);
    const drained = Object.keys(state?.draining || {});
    if (drained.length) parts.push(`Draining: ${drained.join(", ")}.`);
    if (!now.series.size) parts.push("No metrics: they are switched off (metrics.enabled), or this key may not read them.");
    byId("server-note").textContent = parts.join(" ");
    this.drawStages(ready, now);
    byId("models").replaceChildren(...Object.entries(ready.models).map(([name, one]) => this.model(name, one, now)));
    this.drawTenants(now);
  }

  drawStages(ready, now) {
    const names = new Set(Object.keys(ready.stages));
    for (const { labels } of now.series.get("starling_stage_up") || []) names.add(labels.stage);
    byId("stages").replaceChildren(...[...names].map((stage) => {
      const up = sum(now.series, "starling_stage_up", { stage });
      const isReady = ready.stages[stage] ? ready.stages[stage].ready : sum(now.series, "starling_stage_ready", { stage }) === 1;
      const [kind, text] = up === 0 ? ["down", "down"] : isReady ? ["up", "ready"] : ["starting", ready.stages[stage]?.reason || "starting"];
      const restarts = sum(now.series, "starling_stage_restarts_total", { stage });
      const memory = sum(now.series, "starling_process_resident_bytes", { stage });
      const cpu = this.rate(now, "starling_process_cpu_seconds_total", { stage });
      const cell = (value) => element("td", { text: value });
      return element("tr", {}, element("th", { scope: "row", text: stage }),
        element("td", {}, element("span", { class: `badge ${kind}`, text })),
        cell(restarts === undefined ? "\u2013" : figure(restarts)),
        cell(memory === undefined ? "\u2013" : bytes(memory)),
        cell(cpu === undefined ? "\u2013" : `${figure(100 * cpu)} %`));
    }));
  }

  model(name, state, now) {
    const of = { model: name };
    const batch = (kind) => this.rate(now, `starling_batch_size_${kind}`, of);
    const [hits, misses] = ["hits", "misses"].map((kind) => sum(now.series, `starling_kv_cache_${kind}_total`, of) || 0);
    const steps = batch("count");
    const facts = [
      ["Queue", sum(now.series, "starling_queue_depth", of)],
      ["Running", sum(now.series, "starling_running_sequences", of)],
      ["Batch", steps ? batch("sum") / steps : undefined, 1],
      ["Tokens/s", sum(now.series, "starling_tokens_per_second", of), 1],
      ["Prefix hits", hits + misses ? (100 * hits) / (hits + misses) : undefined, 0, " %"],
      ["Sessions", sum(now.series, "starling_sessions", of)],
    ];
    const pages = PAGES.map((kind) => [kind, sum(now.series, "starling_kv_cache_pages", { ...of, state: kind }) || 0]);
    const total = pages.reduce((all, [, count]) => all + count, 0);
    const text = `KV pages: ${pages.map(([kind, count]) => `${figure(count)} ${kind}`).join(", ")}`;
    const bar = element("div", { class: "pages", role: "img", "aria-label": text }, ...pages.map(([kind, count]) => {
      const part = element("span", { class: kind });
      part.style.flexGrow = count;
      return part;
    }));
    const legend = pages.map(([kind, count]) => element("span", { class: `legend ${kind}`, text: `${kind} ${figure(count)}` }));
    return element("article", { class: "model" },
      element("h4", {}, name, " ", element("span", { class: `badge ${state.ready ? "up" : "starting"}`, text: state.ready ? "ready" : state.reason || "not ready" })),
      element("dl", {}, ...facts.map(([label, value, digits, unit]) => element("div", {}, element("dt", { text: label }),
        element("dd", { text: value === undefined ? "\u2013" : figure(value, digits) + (unit || "") })))),
      ...(total ? [element("p", { class: "note" }, "KV pages"), bar, element("p", { class: "note" }, ...legend)] : []));
  }

  drawTenants(now) {
    const tenants = (now.series.get("starling_tenant_tokens_total") || []).map(({ labels, value }) => [labels.tenant, value]);
    byId("tenants-section").hidden = !tenants.length;
    byId("tenants").replaceChildren(...tenants.sort((a, b) => b[1] - a[1]).map(([tenant, value]) => {
      const rate = this.rate(now, "starling_tenant_tokens_total", { tenant });
      return element("tr", {}, element("th", { scope: "row", text: tenant === "all" ? "all (an administrator's key shows each)" : tenant }),
        element("td", { text: figure(value) }), element("td", { text: rate === undefined ? "\u2013" : figure(rate, 1) }));
    }));
  }
}
