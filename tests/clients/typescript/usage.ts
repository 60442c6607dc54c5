// Requests through the types of openapi-typescript, generated with its defaults. Prints a part of each answer.
import createClient from "openapi-fetch";

import type { paths } from "./api.js";

declare const process: { argv: string[] };

const client = createClient<paths>({ baseUrl: process.argv[2]! });
const path = { name: "gpt2-small" };

/** Returns an answer in JSON: the type of an operation with binary answers too is a union with strings. */
function json<T>(data: T): Exclude<T, string | undefined> {
  if (typeof data !== "object") throw new Error(`no JSON: ${data}`);
  return data as Exclude<T, string | undefined>;
}

const models = await client.GET("/models");
const ready: string[] = (models.data ?? []).filter((model) => model.ready).map((model) => model.name);
const model = await client.GET("/models/{name}", { params: { path } });
const use: string | undefined = model.data?.outputs["embeddings"]?.use_as;
const embed = await client.POST("/models/{name}/embed", { params: { path }, body: { input_ids: [[1, 2, 3], [4]] } });
const offsets: number[] = json(embed.data).next_offset;
const refused = await client.POST("/models/{name}/embed", {
  params: { path, query: { offset: "1" } },
  body: { text: "Hello", truncate: "left" },
});
const field: string | null | undefined = refused.error?.field;
const bias = await client.POST("/models/{name}/bias", {
  params: { path: { name: "t5-small" } },
  body: { query_length: 2, key_length: 3 },
});
const shape: number[] = json(bias.data).shape;
const openai = await client.POST("/v1/embeddings", { body: { model: "gpt2-small", input: [[1, 2, 3]], pooling: "mean" } });
const tokens: number | undefined = openai.data?.usage.prompt_tokens;
const unknown = await client.POST("/v1/embeddings", { body: { model: "nope", input: "a" } });
const code: string | null | undefined = unknown.error?.error.code;
const infer = await client.POST("/v2/models/{name}/infer", {
  params: { path },
  body: { inputs: [{ name: "input_ids", datatype: "INT64", shape: [1, 3], data: [1, 2, 3] }] },
});
const output: string | undefined = json(infer.data).outputs[0]?.name;
const index = await client.POST("/v2/repository/index", { body: { ready: true } });
const state: string | undefined = index.data?.[0]?.state;

console.log(JSON.stringify({ ready, use, offsets, field, shape, tokens, code, output, state }));
