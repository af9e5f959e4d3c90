// Compares kvsieve and llama.cpp on GGUF files on one CPU, in turn, in one run.
//
//     npm install --prefix target/peers-llama node-llama-cpp
//     node benches/peers/llama.mjs FILE.gguf ... > table.md
//
// README.md beside this file says what is timed. llama.cpp is the binary that npm's `node-llama-cpp` brings for this CPU.
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { cpus } from "node:os";
import { basename, dirname, join } from "node:path";
import { createRequire } from "node:module";
import { fileURLToPath } from "node:url";

const ROUNDS = 7; // and one before them that warms up
const NEW_TOKENS = 64;
const PROMPTS = [32, 6000]; // characters
const root = join(dirname(fileURLToPath(import.meta.url)), "..", "..");
const binary = join(root, "target", "release", "kvsieve");
const text = readFileSync(join(root, "ARCHITECTURE.md"), "utf8");
const threads = cpus().length;

const files = process.argv.slice(2);
if (files.length === 0) {
    console.error("error: no GGUF file is named, as in: node benches/peers/llama.mjs FILE.gguf");
    process.exit(2);
}
const installed = createRequire(join(root, "target", "peers-llama", "package.json"));
const { getLlama, LlamaLogLevel } = await import(installed.resolve("node-llama-cpp"));
const llama = await getLlama({ gpu: false, build: "never", maxThreads: threads, logLevel: LlamaLogLevel.error });

/** Milliseconds of the first token and, in the median, of those after it; and the tokens of the prompt. */
function ours(file, prompt, options) {
    const limits = ["--max-new-tokens", String(NEW_TOKENS), "--threads", String(threads)];
    const args = ["generate", "--model", file, "--dtype", "bf16", "--prompt", prompt, ...limits, ...options, "--json", "-"];
    const record = JSON.parse(execFileSync(binary, args, { encoding: "utf8" }));
    return { first: record.first_token_ns / 1e6, step: record.step_ns / 1e6, tokens: record.prompt_tokens };
}

/** The same of llama.cpp, with a context that is new and keys and values in f16, as it has them by itself. */
async function theirs(model, prompt) {
    const tokens = model.tokenize(prompt);
    const context = await model.createContext({ contextSize: tokens.length + NEW_TOKENS + 1, batchSize: 512, threads });
    const times = [performance.now()];
    for await (const _ of context.getSequence().evaluate(tokens, { temperature: 0, yieldEogToken: true })) {
        times.push(performance.now());
        if (times.length > NEW_TOKENS) break;
    }
    await context.dispose();
    const [first, ...steps] = times.slice(1).map((time, at) => time - times[at]);
    return { first, step: median(steps), tokens: tokens.length };
}

const median = (values) => values.toSorted((a, b) => a - b)[values.length >> 1];
const shown = (values) =>
    `${median(values).toPrecision(3)} (${Math.min(...values).toPrecision(3)}–${Math.max(...values).toPrecision(3)})`;

console.log(`${cpus()[0].model}, ${threads} threads; ms, medians of ${ROUNDS} rounds in turn (least–most).\n`);
console.log("| file | what | kvsieve | `--activations q8_0` | llama.cpp | times as fast | `--activations q8_0` |");
console.log("|---|---|---:|---:|---:|---:|---:|");
for (const file of files) {
    const model = await llama.loadModel({ modelPath: file, gpuLayers: 0 });
    for (const characters of PROMPTS) {
        const prompt = text.slice(0, characters);
        const rounds = [];
        for (let round = 0; round <= ROUNDS; round++) {
            // llama.cpp rounds activations to bytes with a scale for each 32.
            const rounded = ours(file, prompt, ["--activations", "q8_0"]);
            const sample = { ours: ours(file, prompt, []), rounded, theirs: await theirs(model, prompt) };
            if (round > 0) rounds.push(sample);
        }
        const { ours: own, theirs: other } = rounds[0];
        for (const [key, what] of [["first", `first token of ${own.tokens}, ${other.tokens}`], ["step", "a token after it"]]) {
            const [plain, rounded, theirs] = ["ours", "rounded", "theirs"].map((side) => rounds.map((round) => round[side][key]));
            const ratios = [plain, rounded].map((values) => values.map((value, at) => theirs[at] / value));
            const cells = [plain, rounded, theirs, ...ratios].map(shown);
            console.log(`| ${basename(file)} | ${what} | ${cells.join(" | ")} |`);
        }
    }
    await model.dispose();
}
process.exit(0);
