// Prometheus' text format: only what this server writes.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The series of a text: by name, arrays of `{labels, value}`. */
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/g, (_, character) => (character === "n" ? "\n" : character));
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}

/** The sum of the series of this name whose labels include `labels`; undefined: there is none. */
export function sum(series, name, labels = {}) {
  const wanted = Object.entries(labels);
  const fitting = (series.get(name) || []).filter((one) => wanted.every(([key, value]) => one.labels[key] === value));
  return fitting.length ? fitting.reduce((total, one) => total + one.value, 0) : undefined;
}
