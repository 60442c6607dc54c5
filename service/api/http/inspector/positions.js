// The panel of positions: rows around a window of a request, their cosines, and the end of the model.
import { decodeFloats, embed, getPositions, modelPath, request, splitVectors } from "./api.js";
import { attempt, element, find, number, short } from "./dom.js";
import { cosines, drawHeatmap, drawRuler } from "./pictures.js";

const MAX_ROWS = 64;
const COMPUTED_LENGTH = 8192;
const DELAY = 120;
let model = null;
let requested = 0;
let timer;

const slider = find("slider");
const picture = find("picture");

// Return the kinds of pictures of a model: rows that it adds, rotary outputs, and attention biases. A model without any
// gets the first kind: the service then says what is missing.
function kindsOf({ manifest, outputs }) {
  const steps = manifest.front_end?.steps ?? [];
  const adds = steps.some(({ kind }) => kind === "positions");
  const kinds = Object.keys(outputs).filter((name) => name.startsWith("rotary_"));
  if ("bias.onnx" in manifest.graphs) kinds.push("bias");
  return adds || !kinds.length ? ["position_embeddings", ...kinds] : kinds;
}

async function readRows(kind, first, count) {
  if (kind === "position_embeddings") return getPositions(model, first, count);
  if (kind !== "bias") {
    const ids = Array(count).fill(0);
    return (await embed(model, { input_ids: ids, offset: first, output: kind, encoding: "base64" })).vectors;
  }
  const body = { query_length: count, key_length: first + count, query_offset: first, encoding: "base64" };
  const answer = await (await request(`${modelPath(model)}/bias`, { body })).json();
  const values = decodeFloats(answer.bias ?? answer.relative_positions);
  return splitVectors(values, answer.shape.at(-1)).slice(0, count); // of the first head
}

// Return the largest legal offset + tokens for a kind of picture; null without a limit.
function limitOf(kind) {
  const rotary = model.manifest.rotary.find(({ cos, sin }) => [cos, sin].includes(kind));
  return rotary?.max_len ?? model.max_len;
}

const tokensOfWindow = () => Math.max(1, Math.min(MAX_ROWS, Math.trunc(Number(find("window").value)) || 1));

// Return the words of a window; they also say whether a request would be refused.
function describeWindow(offset, tokens, limit) {
  const end = offset + tokens;
  const from = number(offset);
  const window = `A request of ${tokens} tokens at offset ${from} reads positions ${from} to ${number(end - 1)}.`;
  if (limit === null) return `${window} The positions are computed and have no end.`;
  if (end > limit) return `${window} It is refused: ${number(end - limit)} are beyond max_len ${number(limit)}.`;
  return `${window} max_len is ${number(limit)}, so ${number(limit - end)} remain after it.`;
}

function describeRows(kind, rows, first, strongest) {
  let [least, most] = [Infinity, -Infinity];
  for (const row of rows) for (const value of row) [least, most] = [Math.min(least, value), Math.max(most, value)];
  const content = kind === "bias" ? "Bias of the first head, query by key" : `${kind}, position by dimension`;
  return `${content}: rows ${number(first)} to ${number(first + rows.length - 1)}, ${number(rows[0].length)} columns, ` +
    `values ${short(least)} to ${short(most)}. Red is positive and blue negative, strongest from ${short(strongest)} on; ` +
    "the marks at the sides are the window.";
}

function showCosines(rows, first) {
  const found = cosines(rows);
  drawHeatmap(find("similarity"), found, 0, 0);
  const near = rows.length > 1 ? short(found[0][1]) : "none";
  const far = short(found[0].at(-1));
  find("similarity-words").textContent = `Cosine of each pair of these rows. Position ${number(first)} has cosine ` +
    `${near} with the next one, and ${far} with position ${number(first + rows.length - 1)}.`;
}

async function show() {
  const turn = ++requested;
  const [kind, tokens] = [picture.value, tokensOfWindow()];
  const limit = limitOf(kind);
  slider.max = (limit ?? COMPUTED_LENGTH) - 1;
  const offset = Number(slider.value);
  const length = Number(slider.max) + 1;
  find("slider-value").textContent = number(offset);
  find("positions-result").hidden = false;
  const end = Math.min(offset + tokens, limit ?? Infinity);
  drawRuler(find("ruler"), length, offset, offset + tokens, limit ?? Infinity);
  find("ruler-words").textContent = describeWindow(offset, tokens, limit);
  const first = Math.max(0, Math.min(offset - Math.trunc((MAX_ROWS - tokens) / 2), (limit ?? Infinity) - MAX_ROWS));
  const count = Math.min(MAX_ROWS, (limit ?? Infinity) - first);
  try {
    const rows = await readRows(kind, first, count);
    if (turn !== requested) return; // the slider has moved on
    const strongest = drawHeatmap(find("heatmap"), rows, offset - first, end - first);
    find("heatmap-words").textContent = describeRows(kind, rows, first, strongest);
    find("similarity-figure").hidden = kind === "bias";
    if (kind !== "bias") showCosines(rows, first);
  } catch (error) {
    if (turn !== requested) return;
    find("positions-result").hidden = true;
    throw error;
  }
}

const update = () => attempt(find("positions-error"), show);

function updateLater() {
  find("slider-value").textContent = number(Number(slider.value));
  clearTimeout(timer);
  timer = setTimeout(update, DELAY);
}

// Prepare the panel for a model of tokens, and draw its first positions.
export function openPositions(description) {
  model = description;
  slider.value = 0;
  picture.replaceChildren(...kindsOf(model).map((kind) => element("option", {}, kind)));
  return update();
}

slider.addEventListener("input", updateLater);
find("window").addEventListener("input", updateLater);
picture.addEventListener("change", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => model && update());
