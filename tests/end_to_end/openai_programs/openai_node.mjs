// OpenAI's client for Node: answers, a stream, pages of a list, a file, classes of errors.
import assert from "node:assert";
import OpenAI, { toFile } from "openai";

const { MODEL, QUESTION } = process.env;
const client = new OpenAI();
const asked = {
  model: MODEL,
  messages: [{ role: "user", content: QUESTION }],
  temperature: 0,
  max_tokens: 12,
};
const whole = await client.chat.completions.create(asked);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
const response = await client.responses.create({
  model: MODEL,
  input: QUESTION,
  temperature: 0,
  max_output_tokens: 12,
});
const lines = ["red", "green"].map((colour) => JSON.stringify({ prompt: "a", completion: colour }));
const made = [];
for (const name of ["a.jsonl", "b.jsonl"]) {
  const file = await toFile(Buffer.from(lines.join("\n") + "\n"), name);
  made.push((await client.files.create({ file, purpose: "fine-tune" })).id);
}
const listed = [];
for await (const file of client.files.list({ limit: 1 })) listed.push(file.id);
for (const id of made) assert(listed.includes(id));
for (const id of made) assert((await client.files.delete(id)).deleted);
await assert.rejects(
  client.chat.completions.create({ ...asked, model: "gpt-nobody" }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
const vectors = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
const answers = [whole.choices[0].message.content, streamed, response.output_text];
console.log(JSON.stringify({ answers, guided: null }));
