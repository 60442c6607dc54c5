// The panel of a request: ids or text in, and each token with its position, inputs, norm and first numbers.
import { embed, getJson, hasKey, modelPath } from "./api.js";
import { bar, element, find, norm, onCopy, onSubmit, readIntegers, restart, short, tableRow } from "./dom.js";
import { writeSnippet } from "./snippets.js";

const COLOURS = 6;
const FIRST = 3;
const MAX_SHOWN = 512;
const STAGES = { parse: "parse and check", run: "model" };
const form = find("embed-form");
let model = null;
let sent = null; // the fields of the last request, and the type of its answer
let language = "curl";

const chosenInput = () => form.elements.input.value;

// Whether a model has vectors for sentences, and no positions at all.
export const isStatic = ({ manifest }) => Boolean(manifest.sentence);

// Return the span of a token, in the colour of its place.
export function tokenSpan(text, place, title) {
  return element("span", { className: `token token-${place % COLOURS}`, title }, text);
}

function readFields() {
  const content = find("content").value;
  const hasText = chosenInput() === "text";
  const fields = hasText ? { text: content, return_tokens: true } : { input_ids: readIntegers(content, "input_ids") };
  fields.offset = find("offset").valueAsNumber;
  for (const input of find("indices").querySelectorAll("input")) {
    if (input.value.trim() && fields.input_ids) fields[input.name] = readIntegers(input.value, input.name);
  }
  return { ...fields, output: find("output").value, encoding: "base64" };
}

// Return id and text of each token; the text is null where the request had ids alone, and for special tokens.
function readTokens(fields, answer) {
  if (fields.input_ids) return fields.input_ids.map((id) => ({ id, text: null }));
  const characters = [...fields.text]; // spans count Unicode code points
  return answer.input_ids[0].map((id, place) => {
    const [begin, end] = answer.spans[0][place];
    return { id, text: begin === end ? null : characters.slice(begin, end).join("") };
  });
}

// Write the text of special tokens, which is in no span of the input, over their ids in the page.
function spellSpecials(specials) {
  for (const [id, places] of specials) {
    getJson(`${modelPath(model)}/neighbours?id=${id}&count=1`).then(({ token }) => {
      for (const place of places) place.textContent = token ?? id;
    }, () => {}); // the id stays
  }
}

function showTokens(fields, tokens, vectors, norms) {
  const indices = Object.keys(model.manifest.indices);
  const columns = ["token", "id", !isStatic(model) && "position", ...indices, "norm", "first numbers"].filter(Boolean);
  find("columns").replaceChildren(...columns.map((name) => element("th", { scope: "col" }, name)));
  const specials = new Map();
  const [spans, rows] = [[], []];
  for (const [place, { id, text }] of tokens.slice(0, MAX_SHOWN).entries()) {
    const position = fields.offset + place;
    const span = tokenSpan(text ?? String(id), place, isStatic(model) ? `id ${id}` : `id ${id}, position ${position}`);
    const values = `${[...vectors[place].slice(0, FIRST)].map(short).join(", ")}, …`;
    const row = tableRow(text ?? `token ${place + 1}`, String(id), ...(isStatic(model) ? [] : [String(position)]),
      ...indices.map((name) => String(fields[name]?.[place] ?? 0)), short(norms[place]), values);
    if (fields.text && text === null) specials.set(id, [...(specials.get(id) ?? []), span, row.firstChild]);
    spans.push(span);
    rows.push(row);
  }
  find("spans").replaceChildren(...spans);
  find("vectors").replaceChildren(...rows);
  if (model.manifest.token_embeddings) spellSpecials(specials);
}

function showTimes(timing, total) {
  const found = [...timing.matchAll(/(\w+);dur=([\d.]+)/g)];
  const stages = found.map(([, name, time]) => [STAGES[name] ?? name, Number(time)]);
  const known = stages.reduce((sum, [, time]) => sum + time, 0);
  const times = [...stages, ["network, page", Math.max(0, total - known)], ["total", total]];
  find("timings").replaceChildren(...times.map(([name, time]) =>
    tableRow(name, `${time.toFixed(time < 1 ? 3 : 1)} ms`, bar(time / total))));
}

function show(fields, { answer, vectors, milliseconds, timing }) {
  const tokens = readTokens(fields, answer);
  const norms = vectors.map(norm);
  showTokens(fields, tokens, vectors, norms);
  const last = fields.offset + tokens.length - 1;
  const left = tokens.length - MAX_SHOWN;
  find("embed-words").textContent = `${tokens.length} tokens, shape [${answer.shape.join(", ")}], norms ` +
    `${short(Math.min(...norms))} to ${short(Math.max(...norms))}. ` +
    (isStatic(model) ? "" : `Positions ${fields.offset} to ${last}, next offset ${answer.next_offset.join(", ")}. `) +
    `Use: ${answer.use_as}.` + (left > 0 ? ` ${left} are not shown.` : "");
  showTimes(timing, milliseconds);
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

// Prepare the panel for a model of tokens.
export function openEmbed(description) {
  model = description;
  const hasText = "tokenizer.json" in model.manifest.files;
  find("choice").hidden = !hasText;
  form.elements.input.value = hasText ? "text" : "input_ids";
  const most = model.manifest.vocab_size - 1;
  find("content").value = hasText ? "Hello, world!" : [0, 1, 2, 3].map((id) => Math.min(id + 1, most)).join(", ");
  find("offset").value = 0;
  find("offset-label").hidden = isStatic(model);
  find("output").replaceChildren(...Object.keys(model.outputs).map((name) => element("option", {}, name)));
  find("indices").replaceChildren(...Object.entries(model.manifest.indices).map(([name, count]) =>
    element("label", {}, `${name}, 0 to ${count - 1} `, element("input", { name, autocomplete: "off" }))));
  find("embed-result").hidden = true;
  restart(find("embed-error"));
  showChoice();
  return true;
}

onSubmit(form, find("embed-error"), async (isOld) => {
  find("embed-result").hidden = true;
  const fields = readFields();
  const found = await embed(model, fields);
  if (isOld()) return;
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
onCopy(find("copy"), find("snippet"), find("embed-error"));
