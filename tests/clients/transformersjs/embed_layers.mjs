// Prints the inputs of a Gemma 3n decoder by transformers.js: folder of a model, ids in JSON.
import { Gemma3nForConditionalGeneration, Tensor, env } from "@huggingface/transformers";

const [folder, text] = process.argv.slice(2);
const ids = JSON.parse(text);
env.allowRemoteModels = false;
env.localModelPath = "/";
const model = await Gemma3nForConditionalGeneration.from_pretrained(folder, {
    dtype: "fp32",
    device: "cpu",
    use_external_data_format: { embed_tokens: true },
});
const input_ids = new Tensor("int64", ids.flat().map(BigInt), [ids.length, ids[0].length]);
const outputs = await model.forward({ input_ids });
const found = {};
for (const name of ["logits", "layers"]) {
    const { data, dims, type } = outputs[name];
    const bytes = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
    found[name] = { shape: dims, type, bytes: bytes.toString("hex") };
}
console.log(JSON.stringify(found));
