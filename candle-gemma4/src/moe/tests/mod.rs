//! Router and experts against plain loops, and what happens at the edges.

mod reference;

use std::collections::BTreeMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_cp::{CpContext, SequenceLayout, Tokens};

use self::reference::{Answer, NAMES, Problem};
use super::Router;
use candle_cp_layers::moe::{Dispatch, Experts, RealRows, Routing};
use candle_cp_layers::testing::random;
use candle_cp_layers::{Activation, Linear};

impl Problem {
    fn new(rows: usize, experts: usize, top_k: usize) -> Result<Self> {
        let mut problem = Self {
            rows,
            hidden: 6,
            experts,
            width: 5,
            top_k,
            eps: 3e-3,
            is_real: vec![true; rows],
            values: Default::default(),
            y_grad: Vec::new(),
        };
        problem.fill()?;
        Ok(problem)
    }

    fn fill(&mut self) -> Result<()> {
        let mut seed = 0;
        let mut numbers = |shape: &[usize]| {
            seed += 1;
            random(shape, DType::F64, seed)?.flatten_all()?.to_vec1::<f64>()
        };
        for (index, name) in NAMES.iter().enumerate() {
            self.values[index] = numbers(&self.shape(name))?;
        }
        self.y_grad = numbers(&[self.rows, self.hidden])?;
        Ok(())
    }

    fn with_padding(mut self, padding: &[usize]) -> Self {
        padding.iter().for_each(|&row| self.is_real[row] = false);
        self
    }

    fn tensor(&self, name: &str, dtype: DType) -> Result<Tensor> {
        let index = NAMES.iter().position(|other| *other == name).unwrap();
        Tensor::from_slice(&self.values[index], self.shape(name), &Device::Cpu)?.to_dtype(dtype)
    }

    fn run(&self, dtype: DType) -> Result<Run> {
        let vars = NAMES.iter().map(|name| Var::from_tensor(&self.tensor(name, dtype)?)).collect::<Result<Vec<_>>>()?;
        self.run_with(vars)
    }

    fn run_with(&self, vars: Vec<Var>) -> Result<Run> {
        let [x, z, proj_eh, scale_h, per_expert_scale_e, gate_up_ewh, down_ehw] =
            std::array::from_fn(|i| vars[i].as_tensor().clone());
        let router =
            Router { proj: Linear::plain(proj_eh), scale_h, per_expert_scale_e, top_k: self.top_k, eps: self.eps };
        let routing = router.forward(&x, &RealRows::from_mask(&self.is_real))?;
        let experts = Experts { gate_up_ewh, down_ehw, activation: Activation::GeluTanh };
        let y = experts.forward(&z, &routing.dispatch, &routing.weights_rk)?;
        let y_grad = Tensor::from_slice(&self.y_grad, y.dims(), &Device::Cpu)?.to_dtype(y.dtype())?;
        let gradients = (&y * y_grad)?.sum_all()?.backward()?;
        Ok(Run { vars, routing, y, gradients })
    }
}

struct Run {
    vars: Vec<Var>,
    routing: Routing,
    y: Tensor,
    gradients: GradStore,
}

impl Run {
    fn gradient(&self, name: &str) -> Vec<f64> {
        let index = NAMES.iter().position(|other| *other == name).unwrap();
        if name == "x" && self.routing.chosen_rk.is_empty() {
            return vec![0.0; self.vars[index].elem_count()]; // nothing hangs on the router's input then
        }
        numbers(self.gradients.get(&self.vars[index]).unwrap_or_else(|| panic!("{name} has no gradient")))
    }

    /// Output and gradients within `tolerance` of their largest number.
    fn assert_answer(&self, answer: &Answer, tolerance: f64) {
        assert_near("y", &numbers(&self.y), &answer.y, tolerance);
        for (name, expected) in NAMES.iter().zip(&answer.gradients) {
            assert_near(name, &self.gradient(name), expected, tolerance);
        }
    }
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest difference in units of the largest expected number.
fn error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f64, |largest, value| largest.max(value.abs()));
    let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let worst = worst.fold(0.0f64, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) });
    if worst == 0.0 { 0.0 } else { worst / largest }
}

fn assert_near(name: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let worst = error(found, expected);
    assert!(worst <= tolerance, "{name} is off by {worst:e}");
}

#[test]
fn values_and_gradients_are_those_of_plain_loops() -> Result<()> {
    // Rows, experts, experts per row: one of many, all of them, more experts than assignments, one row, one expert.
    for (rows, experts, top_k) in [(9, 5, 3), (7, 4, 1), (6, 4, 4), (3, 16, 2), (1, 8, 2), (5, 1, 1), (40, 3, 2)] {
        for padding in [&[][..], &[0], &[rows - 1, rows / 2]] {
            let problem = Problem::new(rows, experts, top_k)?.with_padding(padding);
            let answer = problem.solve();
            let run = problem.run(DType::F64)?;
            let chosen: Vec<u32> = answer.chosen.iter().map(|&expert| expert as u32).collect();
            assert_eq!(run.routing.chosen_rk, chosen);
            run.assert_answer(&answer, 1e-12);
            problem.run(DType::F32)?.assert_answer(&answer, 3e-5);
        }
    }
    Ok(())
}

#[test]
fn gradients_are_the_slopes_of_the_output() -> Result<()> {
    let problem = Problem::new(5, 4, 2)?.with_padding(&[3]);
    let run = problem.run(DType::F64)?;
    let loss = |problem: &Problem| -> Result<f64> {
        Ok(numbers(&problem.run(DType::F64)?.y).iter().zip(&problem.y_grad).map(|(y, grad)| y * grad).sum())
    };
    for (index, name) in NAMES.iter().enumerate() {
        let step = 1e-5;
        let moved = |place: usize, by: f64| {
            let mut moved = problem.clone();
            moved.values[index][place] += by;
            loss(&moved)
        };
        let slopes: Result<Vec<f64>> = (0..problem.values[index].len())
            .map(|place| Ok((moved(place, step)? - moved(place, -step)?) / (2.0 * step)))
            .collect();
        assert_near(name, &run.gradient(name), &slopes?, 1e-8);
    }
    Ok(())
}

#[test]
fn one_expert_may_get_all_rows() -> Result<()> {
    for top_k in [1, 2] {
        let mut problem = Problem::new(11, 5, top_k)?;
        let [x, _, proj, scale, ..] = &mut problem.values;
        x.iter_mut().chain(scale).for_each(|value| *value = value.abs());
        proj[3 * problem.hidden..4 * problem.hidden].fill(6.0);
        let answer = problem.solve();
        assert!(answer.chosen.iter().step_by(top_k).all(|&expert| expert == 3));
        let run = problem.run(DType::F64)?;
        run.assert_answer(&answer, 1e-12);
        let (gate_up, per_expert) = (run.gradient("gate_up"), 2 * problem.width * problem.hidden);
        let has_gradient = |expert: usize| gate_up[expert * per_expert..][..per_expert].iter().any(|&g| g != 0.0);
        let hit: Vec<bool> = (0..5).map(|expert| answer.chosen.contains(&expert)).collect();
        assert_eq!((0..5).map(has_gradient).collect::<Vec<_>>(), hit);
        assert_eq!(run.routing.dispatch.busy_experts(), hit.iter().filter(|hit| **hit).count());
    }
    Ok(())
}

#[test]
fn of_equal_experts_the_first_ones_are_chosen() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let mut problem = Problem::new(6, 300, 8)?;
        problem.values[2].fill(0.0);
        problem.values[2][7 * problem.hidden] = -0.0;
        let chosen = problem.run(dtype)?.routing.chosen_rk;
        assert_eq!(chosen, (0..8).cycle().take(6 * 8).collect::<Vec<u32>>());

        // Experts 1 and 4 tie for the second place, 0 and 2 for the last.
        let mut problem = Problem::new(4, 5, 3)?;
        problem.values[0].iter_mut().for_each(|value| *value = value.abs() + 0.1);
        problem.values[3].fill(1.0);
        for (expert, level) in [-1.0, 0.5, -1.0, 2.0, 0.5].into_iter().enumerate() {
            problem.values[2][expert * problem.hidden..][..problem.hidden].fill(level);
        }
        assert_eq!(problem.run(dtype)?.routing.chosen_rk, [3, 1, 4].repeat(4));
        problem.top_k = 2;
        assert_eq!(problem.run(dtype)?.routing.chosen_rk, [3, 1].repeat(4));
        problem.top_k = 4;
        assert_eq!(problem.run(dtype)?.routing.chosen_rk, [3, 1, 4, 0].repeat(4));
    }
    Ok(())
}

#[test]
fn a_nan_stays_in_its_row() -> Result<()> {
    let whole = Problem::new(5, 4, 2)?;
    let expected = numbers(&whole.run(DType::F64)?.y);
    for (value, dtype) in [(f64::NAN, DType::F64), (f64::INFINITY, DType::F64), (f64::NAN, DType::F32)] {
        let mut broken = whole.clone();
        broken.values[0][2 * whole.hidden + 1] = value;
        let found = numbers(&broken.run(dtype)?.y);
        for (row, (found, expected)) in found.chunks(whole.hidden).zip(expected.chunks(whole.hidden)).enumerate() {
            match row {
                2 => assert!(found.iter().all(|value| value.is_nan()), "{found:?}"),
                _ => assert_near("y", found, expected, 1e-5),
            }
        }
    }
    Ok(())
}

#[test]
fn padding_is_not_even_read() -> Result<()> {
    let clean = Problem::new(7, 4, 2)?.with_padding(&[0, 4]);
    let answer = clean.solve();
    let mut dirty = clean.clone();
    for values in [0, 1] {
        for row in [0, 4] {
            dirty.values[values][row * clean.hidden..][..clean.hidden].fill(f64::NAN);
        }
    }
    dirty.run(DType::F64)?.assert_answer(&answer, 1e-12);
    assert!(answer.y[..clean.hidden].iter().all(|&value| value == 0.0));
    Ok(())
}

#[test]
fn no_rows_give_no_output_and_gradients_of_zero() -> Result<()> {
    for (rows, padding) in [(0, &[][..]), (3, &[0, 1, 2][..])] {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let problem = Problem::new(rows, 4, 2)?.with_padding(padding);
            let run = problem.run(dtype)?;
            assert_eq!(run.y.dims(), [rows, problem.hidden]);
            assert!(numbers(&run.y).iter().all(|&value| value == 0.0));
            for name in NAMES {
                assert!(run.gradient(name).iter().all(|&value| value == 0.0), "{name}");
            }
            run.routing.record(0, &mut BTreeMap::new())?;
        }
    }
    Ok(())
}

#[test]
fn any_strides_and_leading_dimensions_do() -> Result<()> {
    let problem = Problem::new(12, 5, 3)?.with_padding(&[7]);
    let answer = problem.solve();
    let vars: Vec<Var> = problem.run(DType::F64)?.vars;
    let [x, z, proj, scale, per_expert_scale_e, gate_up, down]: [Tensor; 7] = std::array::from_fn(|i| {
        let tensor = vars[i].as_tensor();
        // A view with the last two dimensions swapped in memory.
        match tensor.rank() {
            1 => tensor.clone(),
            rank => {
                let (a, b) = (rank - 2, rank - 1);
                tensor.transpose(a, b).and_then(|t| t.contiguous()?.transpose(a, b)).unwrap()
            }
        }
    });
    let router = Router { proj: Linear::plain(proj), scale_h: scale, per_expert_scale_e, top_k: 3, eps: problem.eps };
    let experts = Experts { gate_up_ewh: gate_up, down_ehw: down, activation: Activation::GeluTanh };
    // [4, 3, hidden] as a view of [3, 4, hidden].
    let swapped = |x: &Tensor| x.reshape((4, 3, problem.hidden))?.transpose(0, 1)?.contiguous()?.transpose(0, 1);
    let routing = router.forward(&swapped(&x)?, &RealRows::from_mask(&problem.is_real))?;
    let y = experts.forward(&swapped(&z)?, &routing.dispatch, &routing.weights_rk)?;
    assert_eq!(y.dims(), [4, 3, problem.hidden]);
    let y_grad = Tensor::from_slice(&problem.y_grad, y.dims(), &Device::Cpu)?;
    let gradients = (&y * y_grad)?.sum_all()?.backward()?;
    Run { vars, routing, y, gradients }.assert_answer(&answer, 1e-12);
    Ok(())
}

#[test]
fn bits_do_not_depend_on_threads() -> Result<()> {
    let mut problem = Problem::new(600, 4, 2)?;
    (problem.hidden, problem.width) = (128, 160);
    problem.fill()?;
    let bits = |threads: usize| -> Result<Vec<Vec<f64>>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let run = pool.install(|| problem.run(DType::F32))?;
        Ok(NAMES.iter().map(|name| run.gradient(name)).chain([numbers(&run.y)]).collect())
    };
    let expected = bits(1)?;
    for threads in [1, 2, 3, 7] {
        assert!(bits(threads)? == expected, "{threads} threads give other bits");
    }
    Ok(())
}

/// Rounding the weights and inputs, and computing everything else in f64, is what a short type costs at least.
#[test]
fn short_types_lose_no_more_than_their_rounding() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let mut problem = Problem::new(30, 5, 3)?;
        for (values, name) in problem.values.clone().iter().zip(NAMES) {
            let rounded = Tensor::from_slice(values, problem.shape(name), &Device::Cpu)?.to_dtype(dtype)?;
            problem.values[NAMES.iter().position(|other| *other == name).unwrap()] = numbers(&rounded);
        }
        let answer = problem.solve();
        let run = problem.run(dtype)?;
        let unit = if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-11) };
        assert_eq!(run.y.dtype(), dtype);
        assert_eq!(run.routing.weights_rk.dtype(), DType::F32);
        run.assert_answer(&answer, 4.0 * unit);
    }
    Ok(())
}

#[test]
fn taps_have_every_row() -> Result<()> {
    let problem = Problem::new(6, 4, 2)?.with_padding(&[4]);
    let answer = problem.solve();
    let run = problem.run(DType::F64)?;
    let mut taps = BTreeMap::new();
    run.routing.record(3, &mut taps)?;
    assert_eq!(taps.keys().collect::<Vec<_>>(), ["router.probs.3", "router.top_k_index.3", "router.top_k_weights.3"]);
    assert_near("probs", &numbers(&taps["router.probs.3"]), &answer.probs, 1e-12);
    let index = taps["router.top_k_index.3"].to_vec2::<i64>()?;
    assert_eq!(index[4], [-1, -1]);
    let weights = taps["router.top_k_weights.3"].to_vec2::<f64>()?;
    let scale = &problem.values[4];
    for (row, (index, weights)) in index.iter().zip(&weights).enumerate().filter(|(row, _)| *row != 4) {
        let probs: Vec<f64> = index.iter().map(|&expert| answer.probs[row * 4 + expert as usize]).collect();
        for (place, &expert) in index.iter().enumerate() {
            let expected = probs[place] / probs.iter().sum::<f64>() * scale[expert as usize];
            assert!((weights[place] - expected).abs() < 1e-12);
        }
    }
    assert_eq!(weights[4], [0.0, 0.0]);
    Ok(())
}

#[test]
fn a_rank_knows_its_real_rows() -> candle_cp::Result<()> {
    // 7 tokens on 2 ranks are 8 places; the first row has two documents and padding, the second is full.
    let documents = vec![vec![0, 0, 0, 1, 1, -1, -1], vec![4; 7]];
    let groups = vec![vec![-1; 7]; 2];
    let options = candle_cp::comm::threads::Options::default();
    let rows = candle_cp::comm::threads::run(2, &options, |comm| -> candle_cp::Result<_> {
        let layout = SequenceLayout::head_tail(7, comm.size())?; // tokens 0, 1, 6, 7 and 2, 3, 4, 5
        let context = CpContext::new(comm, layout, Tokens::new(documents.clone(), groups.clone())?)?;
        let real = RealRows::of_rank(&context);
        Ok((real.total(), (0..real.len()).map(|index| real.row(index)).collect::<Vec<_>>()))
    })?;
    assert_eq!(rows, [(8, vec![0, 1, 4, 5, 6]), (8, vec![0, 1, 2, 4, 5, 6, 7])]);
    Ok(())
}

#[test]
fn misfits_are_told() -> Result<()> {
    let problem = Problem::new(6, 4, 2)?;
    let run = problem.run(DType::F64)?;
    let get = |name: &str| problem.tensor(name, DType::F64);
    let (proj_eh, scale_h, per_expert_scale_e) = (get("proj")?, get("scale")?, get("per_expert_scale")?);
    let router = Router { proj: Linear::plain(proj_eh), scale_h, per_expert_scale_e, top_k: 2, eps: 1e-6 };
    let told = |result: Result<Routing>| result.unwrap_err().to_string();
    assert!(told(router.forward(&get("x")?, &RealRows::all(5))).contains("5 rows of width 6 got [6, 6]"));
    let experts = Experts { gate_up_ewh: get("gate_up")?, down_ehw: get("down")?, activation: Activation::GeluTanh };
    let (dispatch, weights) = (&run.routing.dispatch, &run.routing.weights_rk);
    let told = |result: Result<Tensor>| result.unwrap_err().to_string();
    assert!(told(experts.forward(&get("x")?.narrow(0, 0, 5)?, dispatch, weights)).contains("6 rows of width 6"));
    assert!(told(experts.forward(&get("x")?, dispatch, &weights.narrow(0, 1, 5)?)).contains("got weights [5, 2]"));
    let told = |result: Result<Dispatch>| result.unwrap_err().to_string();
    assert!(told(Dispatch::new(&RealRows::all(2), 1, 4, &[3, 4])).contains("expert 4 was chosen; there are 4"));
    assert!(told(Dispatch::new(&RealRows::all(2), 2, 4, &[3])).contains("1 chosen experts for 2 rows with 2 each"));
    Ok(())
}

/// What Hugging Face transformers puts into and gets out of the router and the experts of one layer, in a padded batch.
#[test]
fn a_layer_computes_what_transformers_does() -> Result<()> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/variants/moe");
    let load = |file: &str| candle_core::safetensors::load(folder.join(file), &Device::Cpu);
    let (weights, gradients) = (load("model.safetensors")?, load("grads.safetensors")?);
    let (block, case) = (load("experts.safetensors")?, load("case.safetensors")?);
    let layer =
        ["router.proj.weight", "router.scale", "router.per_expert_scale", "experts.gate_up_proj", "experts.down_proj"]
            .map(|name| format!("model.language_model.layers.2.{name}"));
    let mask = case["input.attention_mask"].flatten_all()?;
    let (rows, hidden) = block["x"].dims2()?;
    let (experts, _) = weights[&layer[0]].dims2()?;
    let problem = Problem {
        rows,
        hidden,
        experts,
        width: weights[&layer[4]].dim(2)?,
        top_k: 3,
        eps: 5e-3,
        is_real: mask.to_vec1::<i64>()?.into_iter().map(|real| real == 1).collect(),
        values: Default::default(),
        y_grad: numbers(&block["y_grad"]),
    };
    let given = [&block["x"], &block["z"]].into_iter().chain(layer.iter().map(|name| &weights[name]));
    let run = problem.run_with(given.map(Var::from_tensor).collect::<Result<_>>()?)?;

    let real_f32 = mask.to_dtype(DType::F32)?.unsqueeze(1)?;
    let y = block["y"].broadcast_mul(&real_f32)?;
    assert_near("y", &numbers(&run.y), &numbers(&y), 2e-5);
    let expected = [&block["x_grad"], &block["z_grad"]].into_iter().chain(layer.iter().map(|name| &gradients[name]));
    for (name, expected) in NAMES.iter().zip(expected) {
        assert_near(name, &run.gradient(name), &numbers(expected), 2e-5);
    }
    let mut taps = BTreeMap::new();
    run.routing.record(2, &mut taps)?;
    for (name, found) in &taps {
        let real = mask.to_dtype(found.dtype())?.unsqueeze(1)?;
        assert_near(name, &numbers(&found.broadcast_mul(&real)?), &numbers(&case[name].broadcast_mul(&real)?), 1e-6);
    }
    Ok(())
}
