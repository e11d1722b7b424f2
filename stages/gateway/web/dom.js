// Construction of elements. Text is only ever set as text: the page's policy forbids HTML from strings.

/** The element with this id. */
export const byId = (id) => document.getElementById(id);

/** A new element with attributes (`on...`: a listener; `text`: its text) and children (elements or strings). */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** A number for people: 1234567 -> 1,234,567; fractions get `digits`. */
export function figure(value, digits = 0) {
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

/** Bytes for people. */
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${figure(value, value < 10 && at > 0 ? 1 : 0)} ${units[at]}`;
}
