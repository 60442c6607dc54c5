// Short names for the document, and the words of numbers.

export const find = (id) => document.getElementById(id);

// Return a new element. `attributes` are properties, or attributes where the name has a dash.
export function element(tag, attributes = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.includes("-")) created.setAttribute(name, value);
    else created[name] = value;
  }
  created.append(...children);
  return created;
}

// Fill a <dl> with pairs of a term and a description; pairs without a description are left out.
export function describe(list, pairs) {
  const kept = pairs.filter(([, content]) => content !== null && content !== undefined && content !== "");
  list.replaceChildren(...kept.flatMap(([term, content]) => [element("dt", {}, term), element("dd", {}, content)]));
}

// Return a row of a table: its head, and its other cells.
export function tableRow(head, ...cells) {
  const others = cells.map((content) => element("td", {}, content));
  return element("tr", {}, element("th", { scope: "row" }, head), ...others);
}

// Return a bar from 0 to `share` of its width. Screen readers get the number beside it.
export function bar(share) {
  const filled = element("span");
  filled.style.inlineSize = `${100 * Math.max(0, Math.min(1, share))}%`;
  return element("span", { className: "bar", "aria-hidden": "true" }, filled);
}

export const number = (value) => value.toLocaleString("en");
export const short = (value) => String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));

// Return the Euclidean norm of a vector.
export const norm = (vector) => Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));

// Return integers of a text with commas or spaces; a word that is no integer is an error.
export function readIntegers(text, field) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^-?\d+$/.test(word));
  if (wrong !== undefined) throw new Error(`${field}: got ${wrong}, expected integers`);
  return words.map(Number);
}

const turns = new WeakMap(); // the last attempt of each place for errors

// Remove the error in `place`. Return a function that says whether this was done again, by a later attempt.
export function restart(place) {
  const turn = {};
  turns.set(place, turn);
  place.replaceChildren();
  return () => turns.get(place) !== turn;
}

// Run `work`, and write its error into `place`. The argument of `work` returns whether a later attempt has begun.
export async function attempt(place, work) {
  const isOld = restart(place);
  try {
    await work(isOld);
  } catch (error) {
    if (!isOld()) place.replaceChildren(error.message);
  }
}

// Run `work` when `form` is submitted. The browser itself refuses some values; an older error would then be wrong.
export function onSubmit(form, place, work) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(place, work);
  });
  form.addEventListener("invalid", () => restart(place), true);
}

// Let a button copy the text of an element. Without TLS, browsers have a clipboard on localhost alone; elsewhere they
// copy a selection.
export function onCopy(button, source, place) {
  const words = button.textContent;
  button.addEventListener("click", () => attempt(place, async () => {
    if (navigator.clipboard) await navigator.clipboard.writeText(source.textContent);
    else {
      getSelection().selectAllChildren(source);
      if (!document.execCommand("copy")) throw new Error("The browser refused to copy. The text is selected: copy it.");
    }
    button.textContent = "Copied";
    setTimeout(() => button.replaceChildren(words), 2000);
  }));
}
