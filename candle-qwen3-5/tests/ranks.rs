//! What has to hold on any number of ranks beside the goldens: documents keep to themselves, lengths that divide by
//! nothing, padding on either side, recomputation, messages that do not grow.

mod support;

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_cp::comm::{Traffic, threads};
use candle_cp::{Communicator, LayoutKind};
use candle_qwen3_5::{Error, Inputs, LocalInputs, Recompute};
use support::{Case, FAMILIES, Run, Settings, assert_close, checkpoint, largest, load, run, values};

/// A case from rows of documents of text, each row padded on the right; `None` stands for padding of this length.
fn text_case(rows: &[&[Result<usize, usize>]]) -> Case {
    let count = |row: &&[Result<usize, usize>]| row.iter().map(|part| part.unwrap_or_else(|len| len)).sum::<usize>();
    let length = rows.iter().map(count).max().unwrap();
    let (mut ids, mut documents, mut labels) = (Vec::new(), Vec::new(), Vec::new());
    for (index, row) in rows.iter().enumerate() {
        let (mut of_row, mut targets) = (Vec::new(), Vec::new());
        for (document, part) in row.iter().enumerate() {
            let (len, document) = match *part {
                Ok(len) => (len, document as i64),
                Err(len) => (len, -1),
            };
            of_row.extend(std::iter::repeat_n(document, len));
            targets.extend((0..len).map(|at| at > 0 && document >= 0));
        }
        of_row.resize(length, -1);
        targets.resize(length, false);
        let of_ids: Vec<i64> = (0..length as i64).map(|at| 3 + (at * 37 + 101 * index as i64) % 490).collect();
        labels.push(of_ids.iter().zip(targets).map(|(&id, keep)| if keep { id } else { -100 }).collect::<Vec<i64>>());
        ids.push(of_ids);
        documents.push(of_row);
    }
    let tensor = |rows: Vec<Vec<i64>>| Tensor::new(rows, &Device::Cpu).unwrap();
    let named = [("input.input_ids", ids), ("input.doc_ids", documents), ("input.labels", labels)];
    Case { tensors: named.into_iter().map(|(name, rows)| (name.to_string(), tensor(rows))).collect() }
}

/// Equal up to the order of sums.
#[track_caller]
fn assert_same(found: &Run, expected: &Run, tolerance: f64, what: &str) {
    assert!((found.loss - expected.loss).abs() <= tolerance, "{what}: loss {} {}", found.loss, expected.loss);
    for (name, gradient) in &expected.gradients {
        let allowed = (10.0 * tolerance * largest(gradient)).max(tolerance);
        assert_close(&format!("{what}: {name}"), &found.gradients[name], gradient, allowed);
    }
}

#[test]
fn lengths_that_divide_by_nothing() {
    let cases: [&[&[Result<usize, usize>]]; 4] =
        [&[&[Ok(1)]], &[&[Ok(2), Ok(1), Ok(2)]], &[&[Ok(37)]], &[&[Ok(29), Ok(1), Ok(13)], &[Ok(17), Ok(9)]]];
    for family in FAMILIES {
        for (index, rows) in cases.iter().enumerate() {
            let case = text_case(rows);
            let single = run(&checkpoint(family), &case, &Settings::SINGLE);
            for (ranks, layout) in [(2, LayoutKind::HeadTail), (3, LayoutKind::Contiguous), (8, LayoutKind::HeadTail)] {
                let sharded = run(&checkpoint(family), &case, &Settings::new(ranks, layout));
                let what = format!("{family}, case {index}, cp {ranks}, {layout}");
                assert_same(&sharded, &single, 2e-5, &what);
                // Of padding rows nothing is said.
                let real =
                    case.get("input.doc_ids").ge(0i64).unwrap().to_dtype(DType::F32).unwrap().unsqueeze(2).unwrap();
                let masked = |logits: &Tensor| logits.broadcast_mul(&real).unwrap();
                assert_close(&what, &masked(&sharded.logits), &masked(&single.logits), 1e-4);
            }
        }
    }
}

/// In f64 there is nothing behind which a small fault could hide.
#[test]
fn ranks_agree_in_f64() {
    for family in FAMILIES {
        let case = Case::golden(family, "case4_packed");
        let settings = Settings { dtype: DType::F64, ..Settings::SINGLE };
        let single = run(&checkpoint(family), &case, &settings);
        for (ranks, layout) in [(3, LayoutKind::Contiguous), (4, LayoutKind::HeadTail)] {
            let sharded = run(&checkpoint(family), &case, &Settings { ranks, layout, ..settings });
            assert_close("logits", &sharded.logits, &single.logits, 1e-10);
            for (name, gradient) in &single.gradients {
                let allowed = 1e-10 * largest(gradient).max(1e-3);
                assert_close(name, &sharded.gradients[name], gradient, allowed);
            }
        }
    }
}

/// `CP(A) == CP([A, B])[A]`, with the pictures in A.
#[test]
fn a_document_is_the_same_alone_and_packed() {
    for family in FAMILIES {
        let (a, b) = (Case::golden(family, "case2_images"), Case::golden(family, "case1_text"));
        let mut packed = a.clone();
        for name in ["input.input_ids", "input.labels", "input.position_ids"] {
            let of_b = match name {
                "input.labels" => b.get(name).affine(0.0, -100.0).unwrap(),
                _ => b.get(name).clone(),
            };
            let dim = a.get(name).dims().len() - 1;
            packed.tensors.insert(name.into(), Tensor::cat(&[a.get(name), &of_b], dim).unwrap());
        }
        let documents = [vec![4i64; 96], vec![1; 48]].concat();
        packed.tensors.insert("input.doc_ids".into(), Tensor::new(vec![documents], &Device::Cpu).unwrap());
        for (ranks, layout) in [(1, LayoutKind::Contiguous), (3, LayoutKind::HeadTail), (4, LayoutKind::Contiguous)] {
            let [alone, both] = [&a, &packed].map(|case| run(&checkpoint(family), case, &Settings::new(ranks, layout)));
            let what = format!("{family}, cp {ranks}, {layout}");
            assert_close(&what, &both.logits.narrow(1, 0, 96).unwrap(), &alone.logits, 1e-4);
            let of_b = both.gradients["inputs_embeds"].narrow(1, 96, 48).unwrap();
            assert_eq!(largest(&of_b), 0.0, "{what}: what is learned of A is none of B's business");
            let mut both = both;
            let of_a = both.gradients["inputs_embeds"].narrow(1, 0, 96).unwrap();
            both.gradients.insert("inputs_embeds".into(), of_a);
            assert_same(&both, &alone, 2e-5, &what);
        }
    }
}

#[test]
fn padding_may_be_on_the_left() {
    for family in FAMILIES {
        let case = text_case(&[&[Ok(23)], &[Err(7), Ok(16)]]);
        let both = run(&checkpoint(family), &case, &Settings::new(3, LayoutKind::HeadTail));
        let mut alone = text_case(&[&[Ok(16)]]);
        for name in ["input.input_ids", "input.labels"] {
            let row = case.get(name).narrow(0, 1, 1).unwrap().narrow(1, 7, 16).unwrap().contiguous().unwrap();
            alone.tensors.insert(name.into(), row);
        }
        let alone = run(&checkpoint(family), &alone, &Settings::SINGLE);
        let padded = both.logits.narrow(0, 1, 1).unwrap().narrow(1, 7, 16).unwrap();
        assert_close(family, &padded, &alone.logits, 1e-4);
    }
}

#[test]
fn recomputation_gives_the_same_bits() {
    for family in FAMILIES {
        let case = Case::golden(family, "case2_images");
        for (ranks, dtype) in [(1, DType::F32), (3, DType::F32), (2, DType::BF16)] {
            let settings = Settings { dtype, ..Settings::new(ranks, LayoutKind::HeadTail) };
            let kept = run(&checkpoint(family), &case, &settings);
            let again = run(&checkpoint(family), &case, &Settings { recompute: Recompute::on, ..settings });
            assert_eq!(kept.gradients.keys().collect::<Vec<_>>(), again.gradients.keys().collect::<Vec<_>>());
            for (name, gradient) in &kept.gradients {
                assert_eq!(
                    values(gradient),
                    values(&again.gradients[name]),
                    "{family}, {ranks} ranks, {dtype:?}: {name}"
                );
            }
        }
    }
}

/// In bf16 results are near those in f32; nothing asks for how near, but for a sum in the wrong type.
#[test]
fn short_types_run() {
    for family in FAMILIES {
        let case = Case::golden(family, "case4_packed");
        let settings = Settings { dtype: DType::BF16, ..Settings::new(2, LayoutKind::HeadTail) };
        let short = run(&checkpoint(family), &case, &settings);
        let loss = case.get("out.loss_mean").to_vec1::<f32>().unwrap()[0];
        assert!((short.loss - f64::from(loss)).abs() < 0.1, "{family}: {} {loss}", short.loss);
    }
}

#[test]
fn wrong_inputs_are_named() {
    let case = Case::golden(FAMILIES[0], "case2_images");
    let (_, model) = load(&checkpoint(FAMILIES[0]), DType::F32);
    let message = |inputs: Inputs| model.embed(&inputs, &mut ()).unwrap_err().to_string();
    let inputs = case.inputs();
    for (inputs, words) in [
        (Inputs { position_ids_abs: None, ..inputs.clone() }, "input position_ids: found none"),
        (Inputs { image_grid_thw: None, ..inputs.clone() }, "input image_grid_thw: found none"),
        (Inputs { pixel_values: None, ..inputs.clone() }, "input pixel_values: found none"),
        (Inputs::text(inputs.input_ids_bs.clone()), "placeholder(s)"),
    ] {
        let message = message(inputs);
        assert!(message.contains(words), "{message}");
    }
    let video = Tensor::new(&[[505u32, 7]], &Device::Cpu).unwrap();
    assert!(message(Inputs::text(video)).contains("placeholder for video"));
    let (_, text_only) = load(&support::variant("dense"), DType::F32);
    let error = text_only.embed(&inputs, &mut ()).unwrap_err().to_string();
    assert!(error.contains("this model has no vision_config"), "{error}");

    let context = candle_cp::CpContext::single(case.tokens()).unwrap();
    let embeds = model.embed(&inputs, &mut ()).unwrap();
    let short = case.get("input.position_ids").narrow(2, 0, 90).unwrap();
    let error = model.shard(&embeds, Some(&short), &context).unwrap_err().to_string();
    assert!(error.contains("input position_ids: found [3, 1, 90]; expected [3, 1, 96]"), "{error}");
    let error = model.decode(&LocalInputs::new(embeds, short), &context, &mut ()).unwrap_err().to_string();
    assert!(error.contains("positions of this rank"), "{error}");
}

/// Bytes that each rank sends in forward and backward, without keys, sums and gathered results.
fn bytes_of_states(tokens: usize, ranks: usize, layout: LayoutKind) -> Vec<usize> {
    let case = text_case(&[&[Ok(tokens)]]);
    let (_, model) = load(&checkpoint(FAMILIES[0]), DType::F32);
    threads::run(ranks, &threads::Options::default(), |comm: Arc<dyn Communicator>| {
        let context = case.context(comm.clone(), layout);
        let inputs = case.inputs();
        let local = model.shard(&model.embed(&inputs, &mut ())?, None, &context)?;
        let hidden = model.decode(&local, &context, &mut ())?;
        let labels = context.shard_labels(case.get("input.labels"))?;
        model.loss(&hidden, &labels)?.backward()?;
        let kinds = [Traffic::State, Traffic::StateGradient, Traffic::Halo, Traffic::HaloGradient];
        let stats = comm.stats();
        Ok::<_, Error>(kinds.iter().map(|kind| stats.of(*kind).bytes_sent).sum::<usize>())
    })
    .unwrap()
}

#[test]
fn what_delta_nets_send_does_not_grow_with_the_sequence() {
    for layout in [LayoutKind::Contiguous, LayoutKind::HeadTail] {
        let [short, long] = [96, 768].map(|tokens| bytes_of_states(tokens, 4, layout));
        assert_eq!(short, long);
        assert!(short.iter().sum::<usize>() > 0);
    }
}
