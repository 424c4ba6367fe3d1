//! Goldens in `fixtures/delta_rule`: computed in f64 by torch autograd, compared with transformers' chunked code, stored in
//! f32.

use crate::reference::numbers;
use candle_core::{DType, Device, Tensor, Var, WithDType};
use candle_cp::comm::threads;
use candle_cp::{CpContext, DeltaHeads, Result, SequenceLayout, Tokens};
use candle_cp_kernels::{
    DeltaBackward, DeltaBackwardRun, DeltaForward, DeltaForwardRun, DeltaInputs, DeltaRun, Element, Real,
};
use std::collections::HashMap;

const HEADS: DeltaHeads = DeltaHeads { key_heads: 2, value_heads: 4, key_dim: 16, value_dim: 16 };

type Golden = HashMap<String, Tensor>;

fn golden(name: &str) -> Golden {
    let path = format!("{}/../fixtures/delta_rule/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

/// `[B, S, H, D]` tensors side by side, `[B, S, C]`.
fn side_by_side(parts: [&Tensor; 3]) -> Result<Tensor> {
    let flat = parts.iter().map(|x| x.flatten_from(2)).collect::<candle_core::Result<Vec<_>>>()?;
    Ok(Tensor::cat(&flat, 2)?)
}

/// Output and gradients of one rank's slice, which is then gathered.
fn run(golden: &Golden, layout: &SequenceLayout, dtype: DType) -> Vec<[Tensor; 4]> {
    let documents = golden["doc_ids"].to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
    let groups = vec![vec![-1; documents[0].len()]; documents.len()];
    threads::run(layout.ranks(), &threads::Options::default(), |comm| {
        let context = CpContext::new(comm, layout.clone(), Tokens::new(documents.clone(), groups.clone())?)?;
        let leaf = |x: &Tensor| Var::from_tensor(&context.shard(&x.to_dtype(dtype)?, 1)?);
        let qkv = leaf(&side_by_side([&golden["q"], &golden["k"], &golden["v"]])?)?;
        let (g, beta) = (leaf(&golden["g"])?, leaf(&golden["beta"])?);
        let out = context.delta_rule(&qkv, &g, &beta, &HEADS)?;
        let d_out = context.shard(&golden["dout"].to_dtype(dtype)?, 1)?;
        let gradients = (&out * d_out)?.sum_all()?.backward()?;
        let all = [
            out.detach(),
            gradients.get(&qkv).unwrap().clone(),
            gradients.get(&g).unwrap().clone(),
            gradients.get(&beta).unwrap().clone(),
        ];
        let gathered = all.iter().map(|x| context.gather(x, 1)).collect::<Result<Vec<_>>>()?;
        Ok::<[Tensor; 4], candle_cp::Error>(gathered.try_into().expect("four"))
    })
    .unwrap()
}

fn close(name: &str, found: &Tensor, expected: &Tensor, tolerance: f64) {
    let (found, expected) = (numbers(found).unwrap(), numbers(expected).unwrap());
    assert_eq!(found.len(), expected.len(), "{name}");
    let largest = expected.iter().fold(1.0, |m: f64, x| m.max(x.abs()));
    for (a, b) in found.iter().zip(&expected) {
        assert!((a - b).abs() <= tolerance * largest, "{name}: {a} for {b}");
    }
}

/// Everything in a file, by the kernels, in the type `T`: the runs are the documents, the first one starts from the initial
/// state.
fn kernels<T: Element<Acc = T> + Real + WithDType>(name: &str, tolerance: f64) {
    let golden = golden(name);
    let of = |x: &Tensor| x.to_dtype(T::DTYPE).unwrap().flatten_all().unwrap().to_vec1::<T>().unwrap();
    let qkv = of(&side_by_side([&golden["q"], &golden["k"], &golden["v"]]).unwrap());
    let [g, beta, d_out, d_final] = ["g", "beta", "dout", "dfinal_state"].map(|name| of(&golden[name]));
    let initial = golden.get("initial_state").map(of);
    let documents = golden["doc_ids"].to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap().remove(0);
    let len = documents.len();
    let inputs = DeltaInputs::new(HEADS, (1, len), &qkv, &g, &beta);
    let mut starts: Vec<_> = (0..len).filter(|&i| i == 0 || documents[i] != documents[i - 1]).collect();
    starts.push(len);
    let runs: Vec<_> = starts.windows(2).map(|ends| DeltaRun { row: 0, tokens: ends[0]..ends[1] }).collect();
    let last = runs.len() - 1;
    let initial = |i: usize| initial.as_deref().filter(|_| i == 0);
    let mut forward = DeltaForward::new(HEADS, len);
    let work = runs.iter().enumerate().map(|(i, run)| DeltaForwardRun {
        run: run.clone(),
        initial: initial(i),
        keep_final: i == last,
    });
    let passed = forward.run(&inputs, &work.collect::<Vec<_>>());
    let mut backward = DeltaBackward::new(HEADS, len);
    let work = runs.iter().enumerate().map(|(i, run)| DeltaBackwardRun {
        run: run.clone(),
        initial: initial(i),
        blocks: &passed[i].blocks,
        d_final: (i == last).then_some(&d_final[..]),
        keep_initial: initial(i).is_some(),
    });
    let d_initial = backward.run(&inputs, &work.collect::<Vec<_>>(), &d_out).swap_remove(0);
    let gradients = backward.finish::<T>();
    let close = |part: &str, found: Vec<T>, expected: &Tensor| {
        let found = Tensor::new(found, &Device::Cpu).unwrap();
        close(&format!("{name}, {:?}: {part}", T::DTYPE), &found, expected, tolerance);
    };
    close("out", forward.finish(), &golden["out"]);
    close("final state", passed[last].final_state.clone(), &golden["final_state"]);
    let d_qkv = side_by_side([&golden["dq"], &golden["dk"], &golden["dv"]]).unwrap();
    close("d_qkv", gradients.qkv, &d_qkv);
    close("d_g", gradients.g, &golden["dg"]);
    close("d_beta", gradients.beta, &golden["dbeta"]);
    if let Some(expected) = golden.get("dinitial_state") {
        close("d_initial", d_initial, expected);
    }
}

#[test]
fn kernels_with_first_and_last_states() {
    for name in ["single", "documents", "initial_state"] {
        kernels::<f64>(name, 2e-7);
        kernels::<f32>(name, 5e-6);
    }
}

/// The gradients in the files are those of output and final state together, and the operator gives no final state: they
/// agree in all documents but the last. Of the file with one document only the output is compared.
#[test]
fn output_and_gradients_of_the_goldens() {
    for name in ["single", "documents"] {
        let golden = golden(name);
        let len = golden["g"].dim(1).unwrap();
        let documents_but_the_last = (name == "documents").then_some(73);
        let expected = side_by_side([&golden["dq"], &golden["dk"], &golden["dv"]]).unwrap();
        for (dtype, tolerance) in [(DType::F64, 2e-7), (DType::F32, 5e-6)] {
            for ranks in [1, 2, 3, 4, 8] {
                for layout in
                    [SequenceLayout::contiguous(len, ranks).unwrap(), SequenceLayout::head_tail(len, ranks).unwrap()]
                {
                    for [out, qkv, g, beta] in run(&golden, &layout, dtype) {
                        close("out", &out, &golden["out"], tolerance);
                        let Some(before_last) = documents_but_the_last else { continue };
                        for (part, found, expected) in
                            [("d_qkv", qkv, &expected), ("d_g", g, &golden["dg"]), ("d_beta", beta, &golden["dbeta"])]
                        {
                            let before = |x: &Tensor| x.narrow(1, 0, before_last).unwrap();
                            close(part, &before(&found), &before(expected), tolerance);
                        }
                    }
                }
            }
        }
    }
}
