// Requests to the service of this page, and its errors. The key stays in this module.

let key = null;

export class ApiError extends Error {
  constructor(status, problem) {
    const id = problem.request_id ? ` (request ${problem.request_id})` : "";
    super(`${status} ${problem.title ?? ""}: ${problem.detail ?? "no details"}${id}`);
    this.status = status;
  }
}

export function setKey(text) {
  key = text;
}

export const hasKey = () => key !== null;

// Return the response of a path; an error of the API is raised with its own words.
export async function request(path, { body, accept = "application/json" } = {}) {
  const headers = { Accept: accept };
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const response = await fetch(path, {
    method, headers, body: JSON.stringify(body), credentials: "omit", cache: "no-store",
  });
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => ({})));
  return response;
}

export const getJson = async (path) => (await request(path)).json();

export function modelPath({ name, version }) {
  return `/models/${encodeURIComponent(name)}/versions/${version}`;
}

// Return float32 numbers of base64.
export function decodeFloats(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

// Return the numbers of base64 in their type: row ids are int64, all others float32.
function decodeNumbers(text, dtype) {
  const floats = decodeFloats(text);
  return dtype === "int64" ? Float64Array.from(new BigInt64Array(floats.buffer), Number) : floats;
}

// Return the rows of float32 vectors with the shape [..., width].
export function splitVectors(values, width) {
  return Array.from({ length: values.length / width }, (_, row) => values.subarray(row * width, (row + 1) * width));
}

// Return one output of `POST …/embed`: the numbers of each token in one list, and the other fields of the response.
// Rows of several lengths are concatenated; outputs of several layers have more than one axis after the tokens.
export async function embed(model, fields) {
  const began = performance.now();
  const response = await request(`${modelPath(model)}/embed`, { body: fields });
  const answer = await response.json();
  const milliseconds = performance.now() - began;
  const output = fields.output ?? "embeddings";
  const values = decodeNumbers(answer[output], answer.dtype);
  const tokens = answer.lengths ? answer.shape[0] : answer.shape[0] * answer.shape[1];
  const vectors = splitVectors(values, values.length / tokens);
  return { answer, vectors, milliseconds, timing: response.headers.get("Server-Timing") ?? "" };
}

// Return the rows of `GET …/positions`, which the service sends as raw numbers.
export async function getPositions(model, first, count) {
  const path = `${modelPath(model)}/positions?first=${first}&count=${count}`;
  const response = await request(path, { accept: "application/octet-stream" });
  const width = Number(response.headers.get("Preblock-Shape").split(",").at(-1));
  return splitVectors(new Float32Array(await response.arrayBuffer()), width);
}
