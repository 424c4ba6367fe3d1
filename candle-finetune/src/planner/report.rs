//! A plan as text for people and as JSON for programs.

use std::fmt::Write;

use candle_cp::comm::Traffic;
use serde_json::{Value, json};

use super::{Advice, Flow, LayerKindPlan, Memory, PlannedModel, RankTraffic, RunPlan};

/// Kinds of traffic of a decoder, with their names for programs.
const KINDS: [(Traffic, &str); 6] = [
    (Traffic::KeyValue, "key_value"),
    (Traffic::KeyValueGradient, "key_value_gradient"),
    (Traffic::State, "state"),
    (Traffic::StateGradient, "state_gradient"),
    (Traffic::Halo, "halo"),
    (Traffic::HaloGradient, "halo_gradient"),
];

impl RunPlan {
    /// Whether the device's memory is enough.
    pub fn fits(&self) -> bool {
        self.memory.peak() <= self.request.device.usable()
    }

    /// Seconds of a step in which a rank only computes: products, and attention of the rank with the most.
    pub fn compute_seconds(&self) -> f64 {
        let layers: f64 =
            self.kinds.iter().map(|kind| kind.count as f64 * (kind.passes[0].compute + kind.passes[1].compute)).sum();
        let work = self.work.iter().find(|work| work.layout == self.request.layout);
        let uneven = work.map_or(1.0, |work| if work.least > 0.0 { work.most / work.least } else { 1.0 });
        self.product_operations / self.request.device.achieved + layers * uneven * self.request.accumulate as f64
    }

    /// Seconds of a step in which transfers are not hidden behind the attention of their layer.
    pub fn open_transfer_seconds(&self) -> f64 {
        let open = |kind: &LayerKindPlan| -> f64 {
            kind.passes.iter().map(|pass| (pass.transfer - pass.compute).max(0.0)).sum::<f64>() * kind.count as f64
        };
        self.kinds.iter().map(open).sum::<f64>() * self.request.accumulate as f64
    }

    /// Seconds that the sum of gradients takes on the link between all ranks, with nothing beside it.
    pub fn reduction_seconds(&self) -> f64 {
        let sent = self.reduction_of(0).iter().map(|flow| flow.sent).sum::<u64>() as f64;
        sent / self.request.device.link(self.request.ranks())
    }

    /// Aligned text.
    pub fn text(&self, model: &PlannedModel, advice: Option<&Advice>) -> String {
        let mut out = String::new();
        self.write_text(&mut out, model, advice).expect("a string takes all text");
        out
    }

    fn write_text(&self, out: &mut String, model: &PlannedModel, advice: Option<&Advice>) -> std::fmt::Result {
        self.write_head(out, model)?;
        self.write_memory(out, advice)?;
        self.write_work(out)?;
        self.write_layers(out)?;
        self.write_step(out)
    }

    fn write_head(&self, out: &mut String, model: &PlannedModel) -> std::fmt::Result {
        let request = &self.request;
        writeln!(
            out,
            "{}: cp {} x dp {} = {} ranks of {}, {}, {}, {}, {}",
            model.name,
            request.cp,
            request.dp,
            grouped(request.ranks() as u64),
            request.device.name,
            request.layout,
            request.dtype.as_str(),
            if request.recompute { "recomputing" } else { "keeping activations" },
            if request.zero { "ZeRO-1" } else { "optimizer state on every rank" },
        )?;
        writeln!(
            out,
            "A step per replica: {} batch(es) of {} row(s) of {} tokens, {} document(s) and {} picture(s) in a row; {} \
             tokens of a row on a rank",
            request.accumulate,
            request.batch_rows,
            grouped(request.seq_len as u64),
            request.documents,
            request.pictures,
            grouped(self.local_tokens as u64),
        )?;
        let counted = &self.parameters;
        writeln!(
            out,
            "Numbers: {:.3} billion loaded (vision {:.3}), {:.3} billion trained",
            billions(counted.loaded),
            billions(counted.vision),
            billions(counted.all_trained()),
        )
    }

    fn write_memory(&self, out: &mut String, advice: Option<&Advice>) -> std::fmt::Result {
        let (memory, device) = (&self.memory, &self.request.device);
        writeln!(out, "\nMemory of the rank that needs most, GiB")?;
        let mut line = |depth: usize, name: &str, bytes: u64, note: &str| {
            let name = format!("{:depth$}{name}", "", depth = 2 * depth);
            writeln!(out, "{}", format!("{name:<52}{:>9.2}  {note}", gib(bytes)).trim_end())
        };
        line(1, "parameters", memory.parameters, "")?;
        line(1, "optimizer: moments, f32", memory.moments, "")?;
        line(1, "optimizer: masters, f32", memory.masters, "")?;
        line(1, "a pass, at its peak", memory.pass, &memory.pass_peak)?;
        let other = if self.request.recompute { "without" } else { "with" };
        let note = format!("{:.2} {other} --recompute", gib(self.memory_otherwise.kept));
        line(2, "kept by forward", memory.kept, &note)?;
        line(3, "embeddings of the full rows, on every rank", memory.embeddings, "")?;
        line(3, "vision tower, all pictures on every rank", memory.vision, "")?;
        line(2, "gradients of weights so far", memory.pass_gradients, "in the type of the weights")?;
        line(2, "logits of a chunk and gradients of the loss", memory.loss, "at the end of forward")?;
        line(2, "keys and values of other ranks, in flight", memory.in_flight, "at most two chunks each way")?;
        line(1, "gradients and update, at their peak", memory.update, "")?;
        line(2, "summed gradients, f32", memory.gradients, "")?;
        line(1, "peak: parameters, optimizer, the larger of the two", memory.peak(), "")?;
        let note =
            format!("{:.0} % of {:.1} GiB", 100.0 * device.usable() as f64 / device.memory as f64, gib(device.memory));
        line(1, &format!("{} has", device.name), device.usable(), &note)?;
        if self.fits() {
            return writeln!(out, "It fits, {:.1} GiB are left.", gib(device.usable() - memory.peak()));
        }
        writeln!(out, "DOES NOT FIT: {:.1} GiB too much. {}", gib(memory.peak() - device.usable()), self.too_large())?;
        match advice {
            Some(advice) => writeln!(
                out,
                "Cheapest change that makes it fit: {}   (peak {:.1} GiB)",
                advice.flags.join(" "),
                gib(advice.memory.peak())
            ),
            None => writeln!(
                out,
                "None of these changes makes it fit, alone or together: --recompute, --zero 1, --dtype bf16, fewer rows, \
                 --freeze vision, --cp up to 8 times, --lora-rank 16."
            ),
        }
    }

    /// The parts that are larger than what a device has, or the largest.
    fn too_large(&self) -> String {
        let memory = &self.memory;
        let mut parts = [
            ("parameters", memory.parameters),
            ("optimizer state", memory.moments + memory.masters),
            ("the pass", memory.pass),
            ("gradients and update", memory.update),
        ];
        parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let [(first, most), (second, next), ..] = parts;
        format!("Most is {first} ({:.1}) and {second} ({:.1}).", gib(most), gib(next))
    }

    fn write_work(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "\nAttention of one batch forward, TFLOP per rank")?;
        writeln!(
            out,
            "  {:<12}{:>12}{:>12}{:>12}{:>11}{:>8}",
            "layout", "least", "mean", "most", "most/mean", "pieces"
        )?;
        for work in &self.work {
            let mark = if work.layout == self.request.layout { "*" } else { " " };
            let ratio = if work.mean > 0.0 { work.most / work.mean } else { 1.0 };
            let [least, mean, most] = [work.least, work.mean, work.most].map(|operations| operations / 1e12);
            let name = work.layout.to_string();
            writeln!(out, "{mark} {name:<12}{least:>12.2}{mean:>12.2}{most:>12.2}{ratio:>11.3}{:>8}", work.pieces)?;
        }
        Ok(())
    }

    fn write_layers(&self, out: &mut String) -> std::fmt::Result {
        let link = self.request.device.link(self.request.cp) / 1e9;
        writeln!(
            out,
            "\nOne layer of each kind: what the rank that sends most sends, at {link} GB/s, beside attention"
        )?;
        writeln!(
            out,
            "  {:<22}{:>5}{:>6}  {:<9}{:>11}{:>11}{:>13}{:>14}{:>8}{:>18}",
            "kind",
            "count",
            "hops",
            "pass",
            "MiB sent",
            "MiB alive",
            "transfer ms",
            "attention ms",
            "hidden",
            "hidden from"
        )?;
        for kind in &self.kinds {
            for (place, pass) in kind.passes.iter().enumerate() {
                let (name, count) =
                    if place == 0 { (kind.name.as_str(), kind.count.to_string()) } else { ("", String::new()) };
                let hidden = match (pass.flow.sent, pass.hides()) {
                    (0, _) => "-",
                    (_, true) => "yes",
                    (_, false) => "NO",
                };
                let from = kind.hides_from[place].map_or("-".to_string(), |from| format!("{} tok/rank", grouped(from)));
                let pass_name = ["forward", "backward"][place];
                writeln!(
                    out,
                    "  {name:<22}{count:>5}{:>6}  {pass_name:<9}{:>11.2}{:>11.2}{:>13.2}{:>14.2}{hidden:>8}{from:>18}",
                    pass.hops,
                    pass.flow.sent as f64 / (1 << 20) as f64,
                    pass.flow.peak as f64 / (1 << 20) as f64,
                    pass.transfer * 1e3,
                    pass.compute * 1e3,
                )?;
            }
        }
        Ok(())
    }

    fn write_step(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "\nOne step, sent by a rank, GiB{:>15}{:>10}{:>10}{:>12}", "least", "mean", "most", "messages")?;
        for (kind, name) in KINDS {
            let sent: Vec<Flow> =
                self.traffic.iter().map(|rank| rank.get(&kind).copied().unwrap_or_default()).collect();
            let most = sent.iter().map(|flow| flow.sent).max().unwrap_or(0);
            if most == 0 {
                continue;
            }
            let least = sent.iter().map(|flow| flow.sent).min().unwrap_or(0);
            let mean = sent.iter().map(|flow| flow.sent).sum::<u64>() / sent.len() as u64;
            let messages = sent.iter().map(|flow| flow.messages).max().unwrap_or(0);
            let name = name.replace('_', " ");
            writeln!(
                out,
                "  {name:<32}{:>10.3}{:>10.3}{:>10.3}{:>12}",
                gib(least),
                gib(mean),
                gib(most),
                grouped(messages)
            )?;
        }
        let [reduce, gather] = self.reduction_of(0);
        let names = if self.request.zero {
            ["gradients, reduce-scatter", "weights, all-gather"]
        } else {
            ["gradients, all-reduce, first half", "gradients, all-reduce, second half"]
        };
        for (name, flow) in names.into_iter().zip([reduce, gather]) {
            writeln!(out, "  {name:<34}{:>18.3}{:>22}", gib(flow.sent), grouped(flow.messages))?;
        }
        let request = &self.request;
        writeln!(
            out,
            "\nA step takes about {:.0} s of computing ({:.1} PFLOP of products at {:.0} TFLOP/s, {:.1} PFLOP of attention), {:.1} s \
             of transfers\nthat attention does not hide, {:.1} s for gradients at {} GB/s if nothing hides them: about {:.0} tokens/s \
             per rank.",
            self.compute_seconds(),
            self.product_operations / 1e15,
            request.device.achieved / 1e12,
            self.attention_operations / 1e15,
            self.open_transfer_seconds(),
            self.reduction_seconds(),
            request.device.link(request.ranks()) / 1e9,
            self.tokens_per_second(),
        )
    }

    fn tokens_per_second(&self) -> f64 {
        let request = &self.request;
        let tokens = (request.batch_rows * request.accumulate * request.seq_len) as f64 / request.cp as f64;
        tokens / (self.compute_seconds() + self.open_transfer_seconds() + self.reduction_seconds())
    }

    /// One JSON object; bytes, seconds and operations as they are.
    pub fn json(&self, model: &PlannedModel, advice: Option<&Advice>) -> Value {
        let request = &self.request;
        json!({
            "model": model.name,
            "request": {
                "seq_len": request.seq_len, "batch_rows": request.batch_rows, "documents": request.documents,
                "pictures": request.pictures, "picture_tokens": request.picture_tokens, "accumulate": request.accumulate,
                "cp": request.cp, "dp": request.dp, "layout": request.layout.to_string(), "dtype": request.dtype.as_str(),
                "recompute": request.recompute, "zero": u8::from(request.zero), "lora_rank": request.lora_rank,
                "freeze": request.freeze.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "device": request.device.name,
            },
            "local_tokens": self.local_tokens,
            "parameters": {
                "loaded": self.parameters.loaded, "trained": self.parameters.trained,
                "adapters": self.parameters.adapters, "vision": self.parameters.vision,
            },
            "memory": memory_json(&self.memory),
            "memory_with_other_recompute": memory_json(&self.memory_otherwise),
            "device": {"memory": request.device.memory, "usable": request.device.usable()},
            "fits": self.fits(),
            "advice": advice.map(|advice| json!({"flags": advice.flags, "memory": memory_json(&advice.memory)})),
            "attention_work": self.work.iter().map(|work| json!({
                "layout": work.layout.to_string(), "least": work.least, "mean": work.mean, "most": work.most,
                "pieces": work.pieces,
            })).collect::<Vec<_>>(),
            "layers": self.kinds.iter().map(kind_json).collect::<Vec<_>>(),
            "traffic": self.traffic.iter().map(traffic_json).collect::<Vec<_>>(),
            "reduction": self.reduction_of(0).map(flow_json),
            "step": {
                "product_operations": self.product_operations, "attention_operations": self.attention_operations,
                "compute_seconds": self.compute_seconds(), "open_transfer_seconds": self.open_transfer_seconds(),
                "reduction_seconds": self.reduction_seconds(), "tokens_per_second_per_rank": self.tokens_per_second(),
            },
        })
    }
}

fn memory_json(memory: &Memory) -> Value {
    json!({
        "parameters": memory.parameters, "moments": memory.moments, "masters": memory.masters,
        "gradients": memory.gradients, "kept": memory.kept, "embeddings": memory.embeddings, "vision": memory.vision,
        "loss": memory.loss, "in_flight": memory.in_flight, "pass": memory.pass, "pass_peak": memory.pass_peak,
        "pass_gradients": memory.pass_gradients, "update": memory.update, "resident": memory.resident(),
        "peak": memory.peak(),
    })
}

fn kind_json(kind: &LayerKindPlan) -> Value {
    let passes = [0, 1].map(|place| {
        let pass = &kind.passes[place];
        json!({
            "hops": pass.hops, "most": flow_json(pass.flow), "transfer_seconds": pass.transfer,
            "attention_seconds": pass.compute, "hidden": pass.hides(), "hidden_from_tokens": kind.hides_from[place],
        })
    });
    json!({"name": kind.name, "count": kind.count, "forward": passes[0], "backward": passes[1]})
}

fn traffic_json(traffic: &RankTraffic) -> Value {
    let of =
        |(kind, name): (Traffic, &str)| (name.to_string(), flow_json(traffic.get(&kind).copied().unwrap_or_default()));
    Value::Object(KINDS.into_iter().map(of).collect())
}

fn flow_json(flow: Flow) -> Value {
    json!({"messages": flow.messages, "sent": flow.sent, "received": flow.received, "peak": flow.peak})
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

fn billions(numbers: u64) -> f64 {
    numbers as f64 / 1e9
}

/// With commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}
