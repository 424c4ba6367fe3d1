//! Hidden states, router results, logits, loss and gradients against Hugging Face transformers, on any number of ranks.

mod support;

use candle_cp::LayoutKind;
use support::{Case, FAMILIES, Settings, assert_forward, assert_gradients, checkpoint, run, variant};

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
