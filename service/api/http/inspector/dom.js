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
  const kept = pairs.filter(([, text]) => text !== null && text !== undefined && text !== "");
  list.replaceChildren(...kept.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]));
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

// Run `work` when `form` is submitted, and write its error into `place`.
export function onSubmit(form, place, work) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(place, work);
  });
}

export async function attempt(place, work) {
  place.replaceChildren();
  try {
    await work();
  } catch (error) {
    place.replaceChildren(error.message);
  }
}
