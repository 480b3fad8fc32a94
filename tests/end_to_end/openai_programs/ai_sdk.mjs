// Vercel's AI SDK: its provider for compatible services, OpenAI's own over both of its APIs, a stream, an object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText } from "ai";

const { MODEL, QUESTION, DIAGNOSIS, OPENAI_API_KEY: apiKey, OPENAI_BASE_URL: baseURL } = process.env;
const compatible = createOpenAICompatible({
  name: "tuneship",
  baseURL,
  apiKey,
  supportsStructuredOutputs: true,
});
const own = createOpenAI({ baseURL, apiKey });
const asked = { prompt: QUESTION, temperature: 0, maxOutputTokens: 12 };
const answers = [];
for (const model of [compatible(MODEL), own.chat(MODEL), own(MODEL)]) {
  answers.push((await generateText({ ...asked, model })).text);
}
let streamed = "";
for await (const piece of streamText({ ...asked, model: own.chat(MODEL) }).textStream) {
  streamed += piece;
}
answers.push(streamed);
const schema = jsonSchema(JSON.parse(DIAGNOSIS));
const { object } = await generateObject({ model: compatible(MODEL), prompt: QUESTION, schema });
console.log(JSON.stringify({ answers, guided: object }));
