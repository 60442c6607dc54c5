// The panel of a request: ids or text in, and each token with its position, inputs, norm and first numbers.
import { embed, hasKey, modelPath } from "./api.js";
import { attempt, describe, element, find, norm, onSubmit, readIntegers, short } from "./dom.js";
import { writeSnippet } from "./snippets.js";

const COLOURS = 6;
const FIRST = 6;
const MAX_SHOWN = 512;
const STAGES = { parse: "parse and check", queue: "queue", run: "model" };
const form = find("embed-form");
let model = null;
let sent = null; // the fields of the last request, and the type of its answer
let language = "curl";

export const chosenInput = () => form.elements.input.value;

// Return the span of a token, in the colour of its place.
export function tokenSpan(text, place, title) {
  return element("span", { className: `token token-${place % COLOURS}`, title }, text);
}

function readFields() {
  const content = find("content").value;
  const hasText = chosenInput() === "text";
  const fields = hasText ? { text: content, return_tokens: true } : { input_ids: readIntegers(content, "input_ids") };
  fields.offset = readIntegers(find("offset").value, "offset")[0] ?? 0;
  for (const input of find("indices").querySelectorAll("input")) {
    if (input.value.trim() && fields.input_ids) fields[input.name] = readIntegers(input.value, input.name);
  }
  return { ...fields, output: find("output").value, encoding: "base64" };
}

// Return id and text of each token; the text is null where the request had ids alone.
function readTokens(fields, answer) {
  if (fields.input_ids) return fields.input_ids.map((id) => ({ id, text: null }));
  const characters = [...fields.text]; // spans count Unicode code points
  return answer.input_ids[0].map((id, place) => {
    const [begin, end] = answer.spans[0][place];
    return { id, text: begin === end ? "special" : characters.slice(begin, end).join("") };
  });
}

function describeInputs(fields, place) {
  const names = Object.keys(model.manifest.indices);
  return names.map((name) => `${name} ${fields[name]?.[place] ?? 0}`).join(", ") || "none";
}

function show(fields, { answer, vectors, milliseconds, timing }) {
  const tokens = readTokens(fields, answer);
  const shown = tokens.slice(0, MAX_SHOWN);
  const norms = vectors.map(norm);
  find("spans").replaceChildren(...shown.map(({ id, text }, place) =>
    tokenSpan(text ?? String(id), place, `id ${id}, position ${fields.offset + place}`)));
  find("vectors").replaceChildren(...shown.map(({ id, text }, place) => element("tr", {},
    element("th", { scope: "row" }, text ?? `token ${place + 1}`), element("td", {}, String(id)),
    element("td", {}, String(fields.offset + place)), element("td", {}, describeInputs(fields, place)),
    element("td", {}, short(norms[place])),
    element("td", {}, [...vectors[place].slice(0, FIRST)].map(short).join(", ") + ", …"))));
  const left = tokens.length - shown.length;
  find("embed-words").replaceChildren(
    `${tokens.length} tokens at positions ${fields.offset} to ${fields.offset + tokens.length - 1}, shape ` +
    `[${answer.shape.join(", ")}], norms ${short(Math.min(...norms))} to ${short(Math.max(...norms))}, ` +
    `next offset ${answer.next_offset.join(", ")}. Use: ${answer.use_as}.` + (left ? ` ${left} are not shown.` : ""));
  const stages = [...timing.matchAll(/(\w+);dur=([\d.]+)/g)];
  describe(find("timings"), [
    ...stages.map(([, stage, time]) => [STAGES[stage] ?? stage, `${time} ms`]),
    ["until the page had it", `${milliseconds.toFixed(1)} ms`],
  ]);
  find("embed-result").hidden = false;
}

function showSnippet() {
  for (const button of document.querySelectorAll("[data-language]")) {
    button.setAttribute("aria-pressed", String(button.dataset.language === language));
  }
  const path = `${modelPath(model)}/embed`;
  find("snippet").textContent = writeSnippet(language, location.origin, path, sent, hasKey());
}

function showChoice() {
  find("content-label").textContent = chosenInput() === "text" ? "Text" : "Token ids, one row";
  find("indices").hidden = chosenInput() === "text";
}

// Copy the text of an element. Without TLS, browsers have a clipboard on localhost alone; elsewhere they copy a selection.
async function copyText(place) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(place.textContent);
    return;
  }
  getSelection().selectAllChildren(place);
  if (!document.execCommand("copy")) throw new Error("The browser refused to copy. The request is selected: copy it.");
}

// Prepare the panel for a model of tokens.
export function openEmbed(description) {
  model = description;
  const hasText = "tokenizer.json" in model.manifest.files;
  find("text-choice").hidden = !hasText;
  form.elements.input.value = hasText ? "text" : "input_ids";
  const most = model.manifest.vocab_size - 1;
  find("content").value = hasText ? "Hello, world!" : [0, 1, 2, 3].map((id) => Math.min(id + 1, most)).join(", ");
  find("offset").value = 0;
  find("output").replaceChildren(...Object.keys(model.outputs).map((name) => element("option", {}, name)));
  find("indices").replaceChildren(...Object.entries(model.manifest.indices).map(([name, count]) =>
    element("label", {}, `${name}, 0 to ${count - 1} `, element("input", { name, autocomplete: "off" }))));
  find("embed-result").hidden = true;
  find("embed-error").replaceChildren();
  showChoice();
}

onSubmit(form, find("embed-error"), async () => {
  find("embed-result").hidden = true;
  const fields = readFields();
  const found = await embed(model, fields);
  sent = { fields, dtype: found.answer.dtype };
  show(fields, found);
  showSnippet();
});
for (const radio of form.elements.input) radio.addEventListener("change", showChoice);
for (const button of document.querySelectorAll("[data-language]")) {
  button.addEventListener("click", () => {
    language = button.dataset.language;
    showSnippet();
  });
}
find("copy").addEventListener("click", () => attempt(find("embed-error"), async () => {
  await copyText(find("snippet"));
  find("status").textContent = "The request was copied.";
}));
