// The request of the page as code to copy. The key is a variable of the environment, never the key itself.

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function writeSnippet(language, origin, path, { fields, dtype }, withKey) {
  const url = origin + path;
  const body = JSON.stringify(fields);
  if (language === "curl") {
    const key = withKey ? ` \\\n  -H "Authorization: Bearer $API_KEY"` : "";
    return `curl ${quote(url)} -H 'Content-Type: application/json'${key} \\\n  -d ${quote(body)}`;
  }
  if (language === "python") return writePython(origin, path, fields, withKey);
  const key = withKey ? `, Authorization: \`Bearer \${process.env.API_KEY}\`` : "";
  return `const response = await fetch(${JSON.stringify(url)}, {
  method: "POST",
  headers: { "Content-Type": "application/json"${key} },
  body: JSON.stringify(${body}),
});
const answer = await response.json();
const bytes = Uint8Array.from(atob(answer.${fields.output}), (character) => character.charCodeAt(0));
console.log(answer.shape, new ${dtype === "int64" ? "BigInt64Array" : "Float32Array"}(bytes.buffer).slice(0, 4));`;
}

function writePython(origin, path, fields, withKey) {
  const [, , name, , version] = path.split("/");
  const { input_ids: ids, text, ...others } = fields;
  const call = ids ? `client.embed(${JSON.stringify(ids)}` : `client.text(${JSON.stringify(text)}`;
  const options = [`model=${JSON.stringify(decodeURIComponent(name))}`, `version=${version}`];
  for (const [option, value] of Object.entries(others)) {
    if (option !== "encoding") options.push(`${option}=${value === true ? "True" : JSON.stringify(value)}`);
  }
  const key = withKey ? `, key=os.environ["API_KEY"]` : "";
  return `${withKey ? "import os\n\n" : ""}import preblock

with preblock.connect(${JSON.stringify(origin)}${key}) as client:
    answer = ${call}, ${options.join(", ")})
    print(answer.vectors.shape, answer.vectors[0, 0, :4])`;
}
