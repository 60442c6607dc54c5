// Prints the vectors of token ids by transformers.js: folder of a model, dtype, ids in JSON.
import { AutoModelForImageTextToText, Tensor, env } from "@huggingface/transformers";

const [folder, dtype, text] = process.argv.slice(2);
const ids = JSON.parse(text);
env.allowRemoteModels = false;
env.localModelPath = "/";
const model = await AutoModelForImageTextToText.from_pretrained(folder, {
    dtype: { embed_tokens: dtype, decoder_model_merged: "fp32", vision_encoder: "fp32" },
    device: "cpu",
    use_external_data_format: { embed_tokens: true },
});
const input_ids = new Tensor("int64", ids.flat().map(BigInt), [ids.length, ids[0].length]);
const vectors = await model.encode_text({ input_ids });
const bytes = Buffer.from(vectors.data.buffer, vectors.data.byteOffset, vectors.data.byteLength);
console.log(JSON.stringify({ shape: vectors.dims, type: vectors.type, bytes: bytes.toString("hex") }));
