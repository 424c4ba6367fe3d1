use super::*;

#[test]
fn a_chain_keeps_its_results_and_adds_gradients_to_zeros() {
    let mut tape = Tape::default();
    let weight = tape.weight(10, true);
    let x = tape.input(100, false);
    let y = tape.op(&[x, weight], 50, Rule::Made);
    let z = tape.op(&[y], 50, Rule::Made);
    let mut meter = Meter::default();
    tape.forward(&mut meter);
    assert_eq!((meter.live, tape.kept()), (100, 100));
    meter.add(50);
    tape.backward(&mut meter, &[z], true);
    // The gradient of z, the one made for y, zeros, and the sum.
    assert_eq!(meter.peak.bytes, 100 + 50 + 50 + 50 + 50);
    assert_eq!((meter.live, meter.weight_gradients), (110, 10));
    tape.drop_graph(&mut meter);
    assert_eq!(meter.live, 10);
}

#[test]
fn frozen_sections_leave_their_last_result_only() {
    let mut tape = Tape::default();
    let x = tape.input(5, false);
    tape.section("one");
    let y = tape.op(&[x], 40, Rule::Made);
    let z = tape.op(&[y], 30, Rule::Made);
    tape.section("two");
    let w = tape.op(&[z], 20, Rule::Made);
    tape.op(&[w], 10, Rule::Made);
    let mut meter = Meter::default();
    tape.forward(&mut meter);
    assert_eq!((meter.peak.bytes, meter.live, tape.kept()), (70, 0, 0));
}

/// A recomputed part with one weight of 100 bytes.
fn part() -> Part {
    let mut stage = Stage::default();
    let input = stage.tape.input(8, true);
    let weight = stage.tape.weight(100, true);
    let out = stage.tape.op(&[input, weight], 8, Rule::Made);
    (stage.inputs, stage.outputs) = (vec![input], vec![out]);
    Part { first: None, second: stage }
}

#[test]
fn sums_of_layers_leave_shares_and_what_is_on_its_way() {
    let held = |ranks, on_the_way| {
        let mut tape = Tape::default();
        let mut x = tape.input(8, true);
        for layer in 0..4 {
            tape.section(format!("layer {layer}, MLP"));
            x = tape.op(&[x], 8, Rule::Again(Box::new(part())));
        }
        let mut meter = Meter::new(Some(Giving { widths: [2, 4], ranks, on_the_way }));
        tape.forward(&mut meter);
        tape.backward(&mut meter, &[x], true);
        // The layer that backward comes to last is summed after it.
        assert_eq!(meter.weight_gradients, 100);
        (meter.shares, meter.peak.bytes)
    };
    let ((one, _), (all, most)) = (held(1, 400), held(2, 1 << 20));
    // Three layers are given away, 200 bytes each in the type of the sums; one rank has nothing on its way.
    assert_eq!((one, all), (600, 300 + 2 * 600));
    let (two, less) = held(2, 400);
    assert_eq!((two, most - less), (300 + 2 * 400, 2 * 200));
}

#[test]
fn a_part_that_runs_again_keeps_nothing_inside() {
    let mut stage = Stage::default();
    let input = stage.tape.input(8, true);
    let weight = stage.tape.weight(3, true);
    let inside = stage.tape.op(&[input, weight], 64, Rule::Made);
    let out = stage.tape.op(&[inside], 8, Rule::Made);
    (stage.inputs, stage.outputs) = (vec![input], vec![out]);
    let mut tape = Tape::default();
    let x = tape.input(8, true);
    let y = tape.op(&[x], 8, Rule::Again(Box::new(Part { first: None, second: stage })));
    let mut meter = Meter::default();
    tape.forward(&mut meter);
    assert_eq!((meter.live, tape.kept()), (8, 8));
    meter.add(8);
    tape.backward(&mut meter, &[y], true);
    // Of x and of the weight, and the output that is kept.
    assert_eq!((meter.live, meter.weight_gradients), (8 + 3 + 8, 3));
    assert!(meter.peak.bytes > 64 * 3, "{:?}", meter.peak);
}
