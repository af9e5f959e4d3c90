use kvsieve::attention::{
    AttentionError, Forward, Kernel, KernelEntry, Outputs, Params, Shape, Workspace, WorkspaceSize,
};
use kvsieve::tensor::DType;

/// One query row at a time, with the online softmax: no row of scores is ever kept.
struct RowByRow;

pub const ENTRY: KernelEntry = KernelEntry {
    name: "row-by-row",
    about: "one query row at a time, with the online softmax",
    parameters: &[],
    build: |_| Ok(Box::new(RowByRow)),
};

/// A query, a row of keys or values, and the weighted sum of values.
const ROWS: usize = 3;

impl Kernel for RowByRow {
    fn name(&self) -> &'static str {
        "row-by-row"
    }

    fn workspace(&self, shape: &Shape, _: &Params, _: DType, _threads: usize) -> WorkspaceSize {
        WorkspaceSize { scores: 0, scratch: ROWS * shape.head_dim }
    }

    fn forward(&self, call: &Forward, outputs: &mut Outputs, workspace: &mut Workspace) -> Result<(), AttentionError> {
        let Forward { shape, params, q, kv, .. } = *call;
        let (width, dtype) = (shape.head_dim, outputs.o.dtype());
        let (query, rest) = workspace.scratch.split_at_mut(width);
        let (row, sum) = rest.split_at_mut(width);
        let rows = outputs.o.bytes_mut().chunks_exact_mut(width * dtype.bytes());
        for (index, (o, lse)) in rows.zip(outputs.lse.iter_mut()).enumerate() {
            let (batch, head, i) =
                (index / (shape.q_heads * shape.q_len), index / shape.q_len % shape.q_heads, index % shape.q_len);
            let kv_head = head / shape.group();
            q.read_rows(batch, head, i, query);
            sum.fill(0.0);
            let (mut largest, mut total) = (f32::NEG_INFINITY, 0.0f32);
            for j in params.visible(i, shape.q_len, kv.len(batch, kv_head)) {
                let key = kv.keys(batch, kv_head, j, 1, row);
                let scaled = params.scale * query.iter().zip(key).map(|(x, y)| x * y).sum::<f32>();
                let logit = params.softcap.map_or(scaled, |cap| cap * (scaled / cap).tanh());
                // What was summed so far is relative to the largest logit so far.
                let larger = largest.max(logit);
                let (kept, weight) = ((largest - larger).exp(), (logit - larger).exp());
                let value = kv.values(batch, kv_head, j, 1, row);
                sum.iter_mut().zip(value).for_each(|(sum, v)| *sum = *sum * kept + weight * v);
                (largest, total) = (larger, total * kept + weight);
            }
            if total > 0.0 {
                sum.iter_mut().for_each(|sum| *sum /= total);
            }
            *lse = largest + total.ln();
            dtype.encode(sum, o);
        }
        Ok(())
    }
}
