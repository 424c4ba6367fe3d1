//! Router and experts with plain loops in f64: every expert computes for every row, and counts 0 where it was not chosen.

/// Sizes, weights, inputs and the gradient of the output.
#[derive(Clone)]
pub(super) struct Problem {
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) experts: usize,
    pub(super) width: usize,
    pub(super) top_k: usize,
    pub(super) eps: f64,
    pub(super) is_real: Vec<bool>,
    /// In the order of [`NAMES`].
    pub(super) values: [Vec<f64>; 7],
    pub(super) y_grad: Vec<f64>,
}

/// The router's input, the experts' input, and the weights.
pub(super) const NAMES: [&str; 7] = ["x", "z", "proj", "scale", "per_expert_scale", "gate_up", "down"];

pub(super) struct Answer {
    pub(super) y: Vec<f64>,
    /// `[rows, experts]`
    pub(super) probs: Vec<f64>,
    /// `[rows, top_k]`, of real rows only.
    pub(super) chosen: Vec<usize>,
    /// In the order of [`NAMES`].
    pub(super) gradients: [Vec<f64>; 7],
}

impl Problem {
    pub(super) fn shape(&self, name: &str) -> Vec<usize> {
        let (rows, hidden, experts, width) = (self.rows, self.hidden, self.experts, self.width);
        match name {
            "x" | "z" => vec![rows, hidden],
            "proj" => vec![experts, hidden],
            "scale" => vec![hidden],
            "per_expert_scale" => vec![experts],
            "gate_up" => vec![experts, 2 * width, hidden],
            "down" => vec![experts, hidden, width],
            _ => unreachable!("{name}"),
        }
    }

    pub(super) fn solve(&self) -> Answer {
        let mut answer = Answer {
            y: vec![0.0; self.rows * self.hidden],
            probs: vec![0.0; self.rows * self.experts],
            chosen: Vec::new(),
            gradients: NAMES.map(|name| vec![0.0; self.shape(name).iter().product()]),
        };
        for row in (0..self.rows).filter(|&row| self.is_real[row]) {
            self.solve_row(row, &mut answer);
        }
        answer
    }

    fn solve_row(&self, row: usize, answer: &mut Answer) {
        let (hidden, experts) = (self.hidden, self.experts);
        let [x, z, proj, scale, per_expert_scale, _, _] = &self.values;
        let (x, z) = (&x[row * hidden..][..hidden], &z[row * hidden..][..hidden]);
        let y_grad = &self.y_grad[row * hidden..][..hidden];

        let mean_square = x.iter().map(|v| v * v).sum::<f64>() / hidden as f64;
        let root = 1.0 / (mean_square + self.eps).sqrt();
        let normed: Vec<f64> = x.iter().map(|v| v * root).collect();
        let factor = 1.0 / (hidden as f64).sqrt();
        let input: Vec<f64> = (0..hidden).map(|i| normed[i] * scale[i] * factor).collect();
        let logits: Vec<f64> =
            (0..experts).map(|e| (0..hidden).map(|i| proj[e * hidden + i] * input[i]).sum()).collect();
        let total: f64 = logits.iter().map(|l| l.exp()).sum();
        let probs: Vec<f64> = logits.iter().map(|l| l.exp() / total).collect();
        answer.probs[row * experts..][..experts].copy_from_slice(&probs);
        let mut is_chosen = vec![false; experts];
        for _ in 0..self.top_k {
            let free = (0..experts).filter(|&e| !is_chosen[e]);
            let best = free.reduce(|best, e| if logits[e] > logits[best] { e } else { best }).unwrap();
            is_chosen[best] = true;
            answer.chosen.push(best);
        }
        let kept: f64 = (0..experts).filter(|&e| is_chosen[e]).map(|e| probs[e]).sum();
        let shares: Vec<f64> = (0..experts).map(|e| if is_chosen[e] { probs[e] / kept } else { 0.0 }).collect();

        let mut weight_grad = vec![0.0; experts];
        for expert in 0..experts {
            let weight = shares[expert] * per_expert_scale[expert];
            weight_grad[expert] = self.expert(expert, z, weight, y_grad, row, answer);
        }

        let share_grad: Vec<f64> =
            (0..experts).map(|e| if is_chosen[e] { weight_grad[e] * per_expert_scale[e] } else { 0.0 }).collect();
        let along: f64 = (0..experts).map(|e| share_grad[e] * shares[e]).sum();
        let prob_grad: Vec<f64> =
            (0..experts).map(|e| if is_chosen[e] { (share_grad[e] - along) / kept } else { 0.0 }).collect();
        let along: f64 = (0..experts).map(|e| prob_grad[e] * probs[e]).sum();
        let mut input_grad = vec![0.0; hidden];
        let [x_grad, _, proj_grad, scale_grad, per_expert_grad, _, _] = &mut answer.gradients;
        for expert in 0..experts {
            per_expert_grad[expert] += weight_grad[expert] * shares[expert];
            let logit_grad = probs[expert] * (prob_grad[expert] - along);
            for i in 0..hidden {
                proj_grad[expert * hidden + i] += logit_grad * input[i];
                input_grad[i] += logit_grad * proj[expert * hidden + i];
            }
        }
        let normed_grad: Vec<f64> = (0..hidden).map(|i| input_grad[i] * scale[i] * factor).collect();
        let along = (0..hidden).map(|i| normed_grad[i] * normed[i]).sum::<f64>() / hidden as f64;
        for i in 0..hidden {
            scale_grad[i] += input_grad[i] * normed[i] * factor;
            x_grad[row * hidden + i] += root * (normed_grad[i] - normed[i] * along);
        }
    }

    /// Adds one expert's part of a row; returns the gradient of its weight.
    fn expert(&self, expert: usize, z: &[f64], weight: f64, y_grad: &[f64], row: usize, answer: &mut Answer) -> f64 {
        let (hidden, width) = (self.hidden, self.width);
        let gate_up = &self.values[5][expert * 2 * width * hidden..][..2 * width * hidden];
        let down = &self.values[6][expert * hidden * width..][..hidden * width];
        let dot = |line: usize| (0..hidden).map(|i| gate_up[line * hidden + i] * z[i]).sum::<f64>();
        let [_, z_grad, _, _, _, gate_up_grad, down_grad] = &mut answer.gradients;
        let gate_up_grad = &mut gate_up_grad[expert * 2 * width * hidden..][..2 * width * hidden];
        let down_grad = &mut down_grad[expert * hidden * width..][..hidden * width];
        let mut weight_grad = 0.0;
        for line in 0..width {
            let (gate, up) = (dot(line), dot(width + line));
            let (value, slope) = gelu(gate);
            let active = value * up;
            let mut active_grad = 0.0;
            for i in 0..hidden {
                answer.y[row * hidden + i] += weight * down[i * width + line] * active;
                active_grad += down[i * width + line] * y_grad[i];
                down_grad[i * width + line] += weight * active * y_grad[i];
            }
            weight_grad += active_grad * active;
            let (gate_grad, up_grad) = (weight * active_grad * up * slope, weight * active_grad * value);
            for i in 0..hidden {
                gate_up_grad[line * hidden + i] += gate_grad * z[i];
                gate_up_grad[(width + line) * hidden + i] += up_grad * z[i];
                z_grad[row * hidden + i] +=
                    gate_grad * gate_up[line * hidden + i] + up_grad * gate_up[(width + line) * hidden + i];
            }
        }
        weight_grad
    }
}

/// Value and slope of the tanh form.
fn gelu(x: f64) -> (f64, f64) {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044715 * x.powi(3))).tanh();
    (0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
}
