//! Kernels on a GPU against the f64 reference. Ignored unless asked for: `cargo test --release -- --ignored cuda`.

use kvsieve::attention::cuda::{Inputs, Results, cuda_kernel};
use kvsieve::attention::{DenseKv, Forward, Params, Shape, reference};
use kvsieve::device::Cpu;
use kvsieve::device::cuda::Runtime;
use kvsieve::memory::{Arena, Label};
use kvsieve::tensor::{DType, Tensor};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

fn random(arena: &Arena, dtype: DType, dims: [usize; 4], seed: u64) -> Tensor {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let count = dims.iter().product();
    let values: Vec<f32> = (0..count).map(|_| StandardNormal.sample(&mut generator)).collect();
    let mut tensor = Tensor::zeros(arena, Label::Input, dtype, dims).unwrap();
    dtype.encode(&values, tensor.bytes_mut());
    tensor
}

#[test]
#[ignore = "cuda: needs a GPU and NVRTC"]
fn cuda_kernels_agree_with_the_reference() {
    let (runtime, cpu) = (Runtime::open(0, None).unwrap(), Cpu::new(None).unwrap());
    let device = runtime.device();
    let shape =
        |batch, q_heads, kv_heads, q_len, kv_len, head_dim| Shape { batch, q_heads, kv_heads, q_len, kv_len, head_dim };
    let shapes = [
        shape(1, 1, 1, 1, 1, 64),
        shape(2, 4, 2, 130, 190, 64),
        shape(1, 4, 1, 65, 300, 128),
        shape(1, 3, 3, 140, 70, 96),
        shape(2, 16, 2, 1, 3000, 128),
    ];
    for shape in shapes {
        let plain = Params::new(shape.head_dim, false);
        let causal = Params { causal: true, ..plain };
        let cases = [plain, causal, Params { window: Some(50), ..causal }, Params { softcap: Some(5.0), ..causal }];
        for (params, kernel, dtype, allowed) in cases.into_iter().flat_map(|params| {
            let (naive, tiled, decode) = ("naive", "tiled", "decode");
            let kinds = [(naive, DType::F32, 3e-6), (naive, DType::Bf16, 8e-3), (tiled, DType::Bf16, 8e-3)];
            let more = [(tiled, DType::F16, 1e-3), (decode, DType::Bf16, 8e-3), (decode, DType::F16, 1e-3)];
            kinds.into_iter().chain(more).map(move |(kernel, dtype, allowed)| (params, kernel, dtype, allowed))
        }) {
            let host = Arena::unlimited();
            let dims = [shape.q_dims(), shape.kv_dims(), shape.kv_dims()];
            let inputs: Vec<Tensor> = (0..3).map(|i| random(&host, dtype, dims[i], i as u64)).collect();
            let plan = cuda_kernel(kernel).unwrap().plan(&shape, &params, dtype, device.limits()).unwrap();
            let arena = Arena::unlimited();
            let alloc = |bytes: usize| device.alloc(&arena, Label::Activations, bytes as u64).unwrap();
            let mut buffers: Vec<_> = inputs.iter().map(|tensor| alloc(tensor.bytes().len())).collect();
            for (buffer, tensor) in buffers.iter_mut().zip(&inputs) {
                buffer.write(tensor.bytes()).unwrap();
            }
            let mut result = Tensor::zeros(&host, Label::Activations, dtype, shape.q_dims()).unwrap();
            let (mut o, mut lse) = (alloc(result.bytes().len()), alloc(4 * shape.rows()));
            o.write(&vec![0xff; result.bytes().len()]).unwrap();
            let mut scratch = plan.scratch(device, &arena).unwrap();
            let tensors = Inputs { q: &buffers[0], k: &buffers[1], v: &buffers[2] };
            plan.forward(&runtime, tensors, Results { o: &mut o, lse: &mut lse }, &mut scratch).unwrap();
            o.read(result.bytes_mut()).unwrap();

            let kv = DenseKv::new(inputs[1].view(), inputs[2].view()).unwrap();
            let call = Forward { shape, params, q: inputs[0].view(), kv: &kv, cpu: &cpu };
            let at = reference::sample_rows(&shape, 64);
            let error = reference::relative_error(&result.view(), &at, &reference::rows(&call, &at));
            assert!(error <= allowed, "{kernel} {dtype} {shape:?} {params:?}: {error:e}, {allowed:e} allowed");
        }
    }
}
