// The front-end in a browser: an artifact's model.onnx over its model.onnx.data, run by onnxruntime-web.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.bundle.min.mjs";

// Load the artifact at the address `folder`, which ends with a slash.
export async function open(folder) {
  const [manifest, session] = await Promise.all([
    fetch(folder + "manifest.json").then((answer) => answer.json()),
    ort.InferenceSession.create(folder + "model.onnx", {
      externalData: [{ path: "model.onnx.data", data: folder + "model.onnx.data" }],
      graphOptimizationLevel: "basic", // the arithmetic that was proven
    }),
  ]);
  return { manifest, session };
}

// Return every output for rows of ids of one length: name -> {dims, data}, the numbers of a Float32Array.
// `offset` has one number, or one for each row; `indices` are rows of further indices by name, by default 0.
export async function run({ manifest, session }, rows, offset = [0], indices = {}) {
  const length = rows[0].length;
  if (rows.some((row) => row.length !== length)) throw new RangeError("rows of ids: allowed are rows of one length");
  if (![1, rows.length].includes(offset.length)) throw new RangeError(`offset: allowed 1 or ${rows.length} numbers`);
  // The graph checks nothing: it wraps what is negative.
  check("input_ids", rows.flat(), manifest.vocab_size);
  check("offset", offset, (manifest.max_len ?? 2 ** 31) - length + 1);
  const feeds = { input_ids: int64(rows.flat(), [rows.length, length]), offset: int64(offset, [offset.length]) };
  for (const [name, count] of Object.entries(manifest.indices)) {
    const values = (indices[name] ?? rows.map((row) => row.map(() => 0))).flat();
    check(name, values, count);
    feeds[name] = int64(values, [rows.length, length]);
  }
  if (session.inputNames.includes("attention_mask")) {
    feeds.attention_mask = int64(rows.flat().map(() => 1), [rows.length, length]);
  }
  return session.run(feeds);
}

function check(name, values, count) {
  const wrong = values.find((value) => !Number.isInteger(value) || value < 0 || value >= count);
  if (wrong !== undefined) throw new RangeError(`${name}: got ${wrong}, expected 0 to ${count - 1}`);
}

function int64(values, dims) {
  return new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);
}
