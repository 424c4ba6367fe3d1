//! Linear, soft cap and cross entropy in plain f64 loops.

/// Loss and gradients.
#[derive(Debug, Clone)]
pub struct Loss {
    pub loss: f64,
    /// `[tokens, H]`.
    pub d_hidden: Vec<f64>,
    /// `[V, H]`.
    pub d_weight: Vec<f64>,
}

/// `hidden` is `[tokens, width]`, `weight` `[V, width]`; labels of -100 do not count.
pub fn cross_entropy(hidden: &[f64], weight: &[f64], labels: &[i64], count: f64, softcap: Option<f64>) -> Loss {
    let width = hidden.len() / labels.len();
    let mut result = Loss { loss: 0.0, d_hidden: vec![0.0; hidden.len()], d_weight: vec![0.0; weight.len()] };
    for (token, &label) in labels.iter().enumerate().filter(|(_, label)| **label != -100) {
        let x = &hidden[token * width..(token + 1) * width];
        let raw: Vec<f64> = weight.chunks(width).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
        let logits: Vec<f64> = raw.iter().map(|&z| softcap.map_or(z, |cap| cap * (z / cap).tanh())).collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|z| (z - largest).exp()).sum();
        result.loss += (largest + sum.ln() - logits[label as usize]) / count;
        for (v, &z) in logits.iter().enumerate() {
            let target = if v == label as usize { 1.0 } else { 0.0 };
            let slope = softcap.map_or(1.0, |cap| 1.0 - (raw[v] / cap).tanh().powi(2));
            let d_raw = ((z - largest).exp() / sum - target) * slope / count;
            for i in 0..width {
                result.d_hidden[token * width + i] += d_raw * weight[v * width + i];
                result.d_weight[v * width + i] += d_raw * x[i];
            }
        }
    }
    result
}
