//! Whole methods that are combinations: a name for a text of the algebra.

use super::registry::Preset;

/// The presets, in the order in which they are listed. A parameter given to a preset goes to every part that has it.
pub const PRESETS: &[Preset] = &[
    Preset {
        name: "delayed-keydiff",
        text: "keydiff+ada:floor=0+delayed",
        paper: "2504.15364",
        about: "the schedule of DMS (arXiv 2506.05345) with keydiff's scores in place of its trained ones: a layer's budget divided over its heads by score, each new token decided on when it leaves a recent window, against what its head lost",
    },
    Preset {
        name: "ada-snapkv",
        text: "snapkv+ada",
        paper: "2407.11550",
        about: "SnapKV with a layer's budget divided over its heads by score",
    },
    Preset {
        name: "pyramidkv",
        text: "snapkv+pyramid",
        paper: "2406.02069",
        about: "SnapKV with more budget for lower layers, as kvpress has it (uniform where the top layer would get less than the window)",
    },
    Preset {
        name: "pyramidkv@factory",
        text: "snapkv:window=8,kernel=7,pool=max,queries=sum+pyramid",
        paper: "2406.02069",
        about: "the same with the settings that KVCache-Factory runs",
    },
    Preset {
        name: "ada-pyramidkv",
        text: "snapkv+pyramid+ada",
        paper: "2407.11550",
        about: "PyramidKV's budgets over layers, Ada-KV's over heads",
    },
    Preset {
        name: "critical-snapkv",
        text: "snapkv+critical",
        paper: "2502.03805",
        about: "SnapKV, half of each head's budget by score times the norm of the projected value",
    },
    Preset {
        name: "ada-critical-snapkv",
        text: "snapkv+critical+ada",
        paper: "2502.03805",
        about: "the same with a layer's budget divided over its heads by score",
    },
    Preset {
        name: "kvzip-plus",
        text: "kvzip:plus=true",
        paper: "2601.07891",
        about: "KVzip's attention, weighed by the norms of hidden states and of projected values",
    },
    Preset {
        name: "kvzap",
        text: "gate+global+delayed:window=128",
        paper: "2601.07891",
        about: "gates trained by `kvsieve train --method kvzap` to foretell KVzip+'s scores: one pool for all layers and heads, each new token decided on when it leaves a recent window",
    },
    Preset {
        name: "ada-expected-attention",
        text: "expected-attention:epsilon=0.01+ada",
        paper: "2510.00636",
        about: "expected attention as kvpress's leaderboard runs it",
    },
    Preset {
        name: "chunkkv",
        text: "snapkv+chunkkv",
        paper: "2502.00299",
        about: "SnapKV's scores over whole chunks, the same ones in every head",
    },
    Preset {
        name: "duoattention",
        text: "streaming-llm+duo",
        paper: "2410.10819",
        about: "heads that look near keep the first and the recent tokens, the others share the rest of the budget",
    },
    Preset {
        name: "streaming-llm@paper",
        text: "streaming-llm+every+rerotate",
        paper: "2309.17453",
        about: "StreamingLLM with positions inside the cache, as its authors have it",
    },
    Preset {
        name: "simlayerkv",
        text: "streaming-llm+simlayer",
        paper: "2410.13846",
        about: "lazy layers keep the first and the recent tokens, the others share the rest of the budget",
    },
    Preset { name: "snapkv@kvpress", text: "snapkv", paper: "2404.14469", about: "SnapKV as NVIDIA's kvpress has it" },
    Preset {
        name: "snapkv@reference",
        text: "snapkv:window=32,kernel=5,queries=sum",
        paper: "2404.14469",
        about: "SnapKV as its authors' code has it (FasterDecoding/SnapKV)",
    },
    Preset {
        name: "snapkv@factory",
        text: "snapkv:window=8,kernel=7,pool=max,queries=sum",
        paper: "2404.14469",
        about: "SnapKV as KVCache-Factory runs it",
    },
    Preset {
        name: "snapkv@frontier",
        text: "snapkv:window=256,kernel=7,queries=sum,span=all,local=128,sink=4",
        paper: "2404.14469",
        about: "SnapKV as sparse-frontier's class has it; its runs have kernel=21",
    },
];
