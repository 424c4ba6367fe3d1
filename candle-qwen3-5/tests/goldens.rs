//! Hidden states, router results, logits, loss and gradients against Hugging Face transformers, on any number of ranks.

mod support;

use candle_core::{Device, Tensor};
use candle_cp::LayoutKind;
use support::{Case, FAMILIES, Settings, assert_forward, assert_gradients, checkpoint, difference, run, variant};

fn assert_golden(family: &str, name: &str, has_gradients: bool, settings: &Settings) {
    let case = Case::golden(family, name);
    let run = run(&checkpoint(family), &case, settings);
    assert_forward(&run, &case);
    if has_gradients {
        assert_gradients(&run, &Case::golden(family, &format!("{name}.grads")).tensors);
    }
}

fn assert_all(settings: &Settings) {
    for family in FAMILIES {
        assert_golden(family, "case1_text", false, settings);
        assert_golden(family, "case2_images", true, settings);
        assert_golden(family, "case3_padded", false, settings);
        assert_golden(family, "case4_packed", true, settings);
    }
}

#[test]
fn one_rank() {
    assert_all(&Settings::SINGLE);
    // Pictures and text from messages, with a loss on answers only.
    assert_golden("qwen3_5-dense", "case6_chat", false, &Settings::SINGLE);
}

/// Without images the places in the documents are the positions.
#[test]
fn positions_of_text_may_be_left_out() {
    for (family, name) in FAMILIES.into_iter().flat_map(|family| ["case1_text", "packed"].map(|name| (family, name))) {
        let mut case = Case::golden(family, "case1_text");
        if name == "packed" {
            // Twice the same document: positions start again.
            for name in ["input.input_ids", "input.labels", "input.position_ids"] {
                let once = case.get(name).clone();
                case.tensors.insert(name.into(), Tensor::cat(&[&once, &once], once.rank() - 1).unwrap());
            }
            let documents = [vec![0i64; 48], vec![1; 48]].concat();
            case.tensors.insert("input.doc_ids".into(), Tensor::new(vec![documents], &Device::Cpu).unwrap());
        }
        let settings = Settings::new(3, LayoutKind::HeadTail);
        let given = run(&checkpoint(family), &case, &settings);
        case.tensors.remove("input.position_ids").unwrap();
        let absent = run(&checkpoint(family), &case, &settings);
        assert_eq!(difference(&given.logits, &absent.logits), 0.0, "{family}, {name}");
    }
}

#[test]
fn contiguous_slices() {
    for ranks in [2, 3, 4, 8] {
        assert_all(&Settings::new(ranks, LayoutKind::Contiguous));
    }
}

#[test]
fn head_tail_slices() {
    for ranks in [2, 3, 4, 8] {
        assert_all(&Settings::new(ranks, LayoutKind::HeadTail));
    }
}

#[test]
fn balanced_slices() {
    assert_all(&Settings::new(3, LayoutKind::Balanced));
    assert_golden("qwen3_5-dense", "case6_chat", false, &Settings::new(3, LayoutKind::HeadTail));
}

/// Text-only models as `save_pretrained` writes them, experts one by one: biases, a tied head, a pad token, other kernels,
/// head sizes, ropes and norms.
#[test]
fn unusual_settings() {
    for name in ["dense", "moe"] {
        let folder = variant(name);
        let case = Case::load(&folder.join("case.safetensors"));
        let golden = Case::load(&folder.join("grads.safetensors")).tensors;
        for (ranks, layout) in [(1, LayoutKind::Contiguous), (3, LayoutKind::HeadTail), (5, LayoutKind::Contiguous)] {
            let run = run(&folder, &case, &Settings::new(ranks, layout));
            assert_forward(&run, &case);
            assert_gradients(&run, &golden);
        }
    }
}
