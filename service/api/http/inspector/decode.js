// The panel of a decode stream: step, rewind and reorder rows.
import { hasKey } from "./api.js";
import { attempt, element, find, norm, onSubmit, readIntegers, restart, short } from "./dom.js";
import { isStatic, tokenSpan } from "./embed.js";
import { openStream } from "./streams.js";

const MAX_MESSAGES = 50;
const place = find("decode-error");
let model = null;
let stream = null;
let rows = []; // for each row: its first offset, and the ids fed so far

function showRows(offset) {
  find("stream-rows").replaceChildren(...rows.map(({ begin, ids }, row) => element("li", {},
    `offset ${offset[row]}: `,
    ...ids.map((id, place) => tokenSpan(String(id), begin + place, `id ${id}, position ${begin + place}`)))));
}

let last = Promise.resolve(); // ends with the answer to the last message

// Return a function that does `work` after the answers to earlier messages: each changes the rows and their offsets.
// It does nothing if the stream is another one by then.
function inTurn(work) {
  return () => {
    const opened = stream;
    const done = last.then(() => stream === opened && work());
    last = done.catch(() => {}); // shown by its own attempt
    return done;
  };
}

async function send(words, message, change) {
  const { offset, shape, vectors } = await stream.send(message);
  change(offset);
  showRows(offset);
  const norms = vectors.map(norm).map(short).join(", ");
  const cells = [words, `[${offset.join(", ")}]`, shape ? `[${shape.join(", ")}]` : "", norms];
  const list = find("messages");
  list.prepend(element("tr", {}, ...cells.map((text) => element("td", {}, text))));
  while (list.children.length > MAX_MESSAGES) list.lastChild.remove();
}

function close() {
  stream?.close();
  stream = null;
  last = Promise.resolve(); // a broken connection may still wait for an answer
  find("stream").hidden = true;
}

// Prepare the panel for a model of tokens. Return whether the model has positions to step along.
export function openDecode(description) {
  close();
  model = description;
  find("messages").replaceChildren();
  restart(place);
  find("transport").textContent = hasKey()
    ? "A browser cannot send a key with a WebSocket, so each step is a POST …/embed with its offset."
    : "The stream is a WebSocket; the service keeps the offset of each row.";
  const { vocab_size: count } = model.manifest;
  find("step-ids").value = `${Math.min(1, count - 1)}, ${Math.min(2, count - 1)}; ${Math.min(3, count - 1)}`;
  return !isStatic(model);
}

onSubmit(find("open-form"), place, async (isOld) => {
  close();
  const [count, begin] = ["rows", "open-offset"].map((name) => find(name).valueAsNumber);
  const opened = await openStream(model, Array(count).fill(begin));
  if (isOld()) {
    opened.close();
    return;
  }
  stream = opened;
  rows = Array.from({ length: count }, () => ({ begin, ids: [] }));
  find("messages").replaceChildren();
  find("stream").hidden = false;
  showRows(rows.map((row) => row.begin));
  find("step-ids").focus();
});
onSubmit(find("step-form"), place, inTurn(async () => {
  const given = find("step-ids").value.split(";").map((text) => readIntegers(text, "input_ids"));
  const ids = rows.map((_, row) => given[row] ?? []);
  if (given.length > rows.length) throw new Error(`input_ids: got ${given.length} rows, expected ${rows.length}`);
  await send(`step ${JSON.stringify(ids)}`, { input_ids: ids }, () => {
    rows = rows.map((row, index) => ({ ...row, ids: [...row.ids, ...ids[index]] }));
  });
}));
onSubmit(find("rewind-form"), place, inTurn(async () => {
  const offsets = readIntegers(find("rewind").value, "rewind");
  await send(`rewind ${JSON.stringify(offsets)}`, { rewind: offsets }, (offset) => {
    rows = rows.map(({ begin, ids }, row) => ({
      begin: Math.min(begin, offset[row]), ids: ids.slice(0, Math.max(0, offset[row] - begin)),
    }));
  });
}));
onSubmit(find("reorder-form"), place, inTurn(async () => {
  const order = readIntegers(find("reorder").value, "reorder");
  await send(`reorder ${JSON.stringify(order)}`, { reorder: order }, () => {
    rows = order.map((row) => rows[row]);
  });
}));
find("close").addEventListener("click", () => attempt(place, async () => close()));
