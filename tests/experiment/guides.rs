//! The guides' examples do what the guides say, and stand in them as they are compiled.

#[path = "../../docs/examples/kernel.rs"]
mod kernel;
#[path = "../../docs/examples/task.rs"]
mod task;

use crate::common::{Problem, call, forward_call, inputs, shape};
use kvsieve::attention::{DenseKv, Params, reference};
use kvsieve::task::{Draw, Tokens, generate};
use kvsieve::tensor::DType;

#[test]
fn every_guide_shows_its_example() {
    for name in ["kernel", "format", "task", "figure", "measure"] {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/docs");
        let read = |path: String| std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let (guide, example) = (read(format!("{root}/adding-a-{name}.md")), read(format!("{root}/examples/{name}.rs")));
        assert!(
            guide.contains(&format!("```rust\n{example}```\n")),
            "docs/adding-a-{name}.md lacks docs/examples/{name}.rs"
        );
    }
}

#[test]
fn the_kernel_agrees_with_the_reference() {
    let causal = Params::new(24, true);
    for (extents, params) in [
        ([2, 4, 2, 9, 9, 24], causal),
        ([1, 3, 1, 1, 40, 24], causal),
        ([1, 2, 2, 5, 17, 24], Params { window: Some(4), softcap: Some(3.0), ..causal }),
        ([1, 2, 1, 6, 4, 24], causal),
    ] {
        let problem = Problem { shape: shape(extents), params, dtype: DType::F32 };
        let inputs = inputs(&problem, 7);
        let kv = DenseKv::new(inputs.k.view(), inputs.v.view()).unwrap();
        let call = call(&problem, &inputs, &kv, 1);
        let kernel = (kernel::ENTRY.build)(&kernel::ENTRY.name.parse().unwrap()).unwrap();
        let outputs = forward_call(&*kernel, &call, problem.dtype);
        let at = reference::sample_rows(&problem.shape, problem.shape.q_len);
        let expected = reference::rows(&call, &at);
        assert!(reference::relative_error(&outputs.o.view(), &at, &expected) < 1e-6, "{extents:?}");
        let apart =
            |(lse, row): (&f32, &reference::Row)| *lse == row.lse as f32 || (f64::from(*lse) - row.lse).abs() < 1e-5;
        assert!(outputs.lse.iter().zip(&expected).all(apart), "{extents:?}");
    }
}

/// A token for each byte.
struct Bytes;

impl Tokens for Bytes {
    fn encode(&self, text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    fn decode(&self, tokens: &[u32]) -> String {
        tokens.iter().map(|&token| token as u8 as char).collect()
    }
}

#[test]
fn the_task_fills_its_context_and_knows_its_answer() {
    let entry = &task::ENTRY;
    let task = (entry.build)(&"shelves:most=20".parse().unwrap()).unwrap();
    for seed in 0..5 {
        let sample = generate(entry.name, &*task, 1000, &Draw::new(seed, 0), &Bytes).unwrap();
        let [question] = &sample.questions[..] else { panic!("one question") };
        assert!((900..=1000).contains(&sample.context.len()), "{}", sample.context.len());
        assert_eq!((question.score(&question.expected), question.score(" none")), (1.0, 0.0));
        let said = format!("{}{}", question.answer_prefix, question.expected);
        assert!(sample.context.contains(&said), "{said}");
    }
    assert!((entry.build)(&"shelves:most=0".parse().unwrap()).is_err());
}
