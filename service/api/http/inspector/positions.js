// The panel of positions: rows around a window of a request, their cosines, and the end of the model.
import { decodeFloats, embed, getPositions, modelPath, request, splitVectors } from "./api.js";
import { attempt, element, find, number, restart, short } from "./dom.js";
import { cosines, drawPlot, drawRuler, measure } from "./pictures.js";

const MAX_ROWS = 64;
const COMPUTED_LENGTH = 8192;
const DELAY = 120;
const place = find("positions-error");
let model = null;
let timer;

const slider = find("slider");
const picture = find("picture");

// Return the kinds of pictures of a model: rows that it adds, rotary outputs, and attention biases.
function kindsOf({ manifest, outputs }) {
  const steps = manifest.front_end?.steps ?? [];
  const adds = steps.some(({ kind }) => kind === "positions");
  const kinds = Object.keys(outputs).filter((name) => name === "bias" || name.startsWith("rotary_"));
  return adds ? ["position_embeddings", ...kinds] : kinds;
}

async function readRows(kind, first, count) {
  if (kind === "position_embeddings") return getPositions(model, first, count);
  if (kind !== "bias") {
    const ids = Array(count).fill(0);
    return (await embed(model, { input_ids: ids, offset: first, output: kind, encoding: "base64" })).vectors;
  }
  const body = { query_length: count, key_length: first + count, query_offset: first, encoding: "base64" };
  const answer = await (await request(`${modelPath(model)}/bias`, { body })).json();
  return splitVectors(decodeFloats(answer.bias), answer.shape.at(-1)).slice(0, count); // of the first head
}

// Return the largest legal offset + tokens for a kind of picture; null without a limit.
function limitOf(kind) {
  const rotary = model.manifest.rotary.find(({ cos, sin }) => [cos, sin].includes(kind));
  return rotary?.max_len ?? model.max_len;
}

function tokensOfWindow() {
  const field = find("window");
  if (!field.validity.valid) throw new Error(`tokens: got ${field.value || "no number"}, expected 1 to ${MAX_ROWS}`);
  return field.valueAsNumber;
}

// Return the words of a window; they also say whether a request would be refused.
function describeWindow(offset, tokens, limit) {
  const end = offset + tokens;
  const from = number(offset);
  const window = `A request of ${tokens} tokens at offset ${from} reads positions ${from} to ${number(end - 1)}.`;
  if (limit === null) return `${window} The positions are computed and have no end.`;
  if (end > limit) return `${window} It is refused: ${number(end - limit)} are beyond max_len ${number(limit)}.`;
  return `${window} max_len is ${number(limit)}, so ${number(limit - end)} remain after it.`;
}

function showRows(kind, rows, first, window) {
  const { least, most, strongest } = measure(rows);
  const [name, down, across] =
    kind === "bias" ? ["Bias of the first head", "query", "key"] : [kind, "position", "dimension"];
  drawPlot(find("heatmap"), rows, { name: down, first }, { name: across, first: 0 }, strongest, ...window);
  const last = first + rows.length - 1;
  find("heatmap-words").textContent = `${name}, ${down} by ${across}: rows ${number(first)} to ${number(last)}, ` +
    `${number(rows[0].length)} columns, values ${short(least)} to ${short(most)}. Red is positive and blue negative, ` +
    `strongest from ${short(strongest)} on. The bar at the left is the window.`;
}

function showCosines(rows, first) {
  const found = cosines(rows);
  const axis = { name: "position", first };
  drawPlot(find("similarity"), found, axis, axis, 1);
  const near = rows.length > 1 ? short(found[0][1]) : "none";
  const far = short(found[0].at(-1));
  find("similarity-words").textContent = `Cosine of each pair of these rows. Position ${number(first)} has cosine ` +
    `${near} with the next one, and ${far} with position ${number(first + rows.length - 1)}.`;
}

async function show(isOld) {
  const [kind, tokens] = [picture.value, tokensOfWindow()];
  const limit = limitOf(kind);
  slider.max = (limit ?? COMPUTED_LENGTH) - 1;
  const offset = Number(slider.value);
  const length = Number(slider.max) + 1;
  find("slider-value").textContent = number(offset);
  const end = Math.min(offset + tokens, limit ?? Infinity);
  const first = Math.max(0, Math.min(offset - Math.trunc((MAX_ROWS - tokens) / 2), (limit ?? Infinity) - MAX_ROWS));
  const count = Math.min(MAX_ROWS, (limit ?? Infinity) - first);
  const rows = await readRows(kind, first, count);
  if (isOld()) return; // the slider has moved on
  find("positions-result").hidden = false;
  drawRuler(find("ruler"), length, offset, offset + tokens, limit ?? Infinity);
  find("ruler-words").textContent = describeWindow(offset, tokens, limit);
  showRows(kind, rows, first, [offset - first, end - first]);
  find("similarity-figure").hidden = kind === "bias";
  if (kind !== "bias") showCosines(rows, first);
}

async function update() {
  await attempt(place, show);
  if (place.hasChildNodes()) find("positions-result").hidden = true;
}

function updateLater() {
  find("slider-value").textContent = number(Number(slider.value));
  clearTimeout(timer);
  timer = setTimeout(update, DELAY);
}

// Prepare the panel for a model of tokens, and draw its first positions. Return whether it has any.
export function openPositions(description) {
  model = description;
  restart(place);
  find("positions-result").hidden = true;
  slider.value = 0;
  const kinds = kindsOf(model);
  picture.replaceChildren(...kinds.map((kind) => element("option", {}, kind)));
  if (kinds.length) update();
  return kinds.length > 0;
}

slider.addEventListener("input", updateLater);
find("window").addEventListener("input", updateLater);
picture.addEventListener("change", update);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture.value && update());
