//! Steps by hand, both ways of taking one, and state that comes back from a file.

use super::*;
use candle_core::Device;

fn named(name: &str, tensor: Tensor) -> Gradients {
    Gradients::from_named(BTreeMap::from([(name.to_string(), tensor)]))
}

/// Two steps computed by hand in exact arithmetic: betas 0.9 and 0.5, eps 0, rate 0.1, decay 0.5.
/// Step 1, g = 2: mean 0.2 / 0.1 = 2, square 2 / 0.5 = 4, update 0.1 * 2 / 2.
/// Step 2, g = -1: mean 0.08 / 0.19, square 1.5 / 0.75 = 2, update 0.1 * (0.08 / 0.19) / sqrt(2).
#[test]
fn two_steps_by_hand() -> Result<()> {
    let config = AdamWConfig { beta1: 0.9, beta2: 0.5, eps: 0.0, weight_decay: 0.5 };
    let device = Device::Cpu;
    let second_update = 0.1 * (0.08 / 0.19) / 2f64.sqrt();
    for (rank, decay) in [(1, 1.0), (2, 0.95)] {
        let shape = vec![1usize; rank];
        let var = Var::from_tensor(&Tensor::full(3.0f64, shape.as_slice(), &device)?)?;
        let variables = BTreeMap::from([("w".to_string(), var.clone())]);
        let mut optimizer = AdamW::new(&variables, config)?;
        let value = || Ok::<_, candle_core::Error>(var.flatten_all()?.to_vec1::<f64>()?[0]);

        optimizer.step(&named("w", Tensor::full(2.0f64, shape.as_slice(), &device)?), 0.1)?;
        let first = 3.0 * decay - 0.1;
        assert!((value()? - first).abs() < 1e-12, "{} {first}", value()?);

        optimizer.step(&named("w", Tensor::full(-1.0f64, shape.as_slice(), &device)?), 0.1)?;
        let second = first * decay - second_update;
        assert!((value()? - second).abs() < 1e-12, "{} {second}", value()?);
        assert_eq!(optimizer.steps(), 2);
    }
    Ok(())
}

#[test]
fn in_place_and_by_tensors_are_the_same() -> Result<()> {
    let row = |values: [f64; 3]| Tensor::new(&values, &Device::Cpu);
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6), (DType::BF16, 1e-6)] {
        let state = state_dtype(dtype);
        let prepare = || -> Result<(Var, Moments)> {
            let var = Var::from_tensor(&row([1.0, -2.0, 3.0])?.to_dtype(dtype)?)?;
            let mut moments = Moments::new(&var)?;
            moments.mean = row([0.1, 0.2, -0.3])?.to_dtype(state)?;
            moments.square = row([0.5, 0.0, 2.0])?.to_dtype(state)?;
            Ok((var, moments))
        };
        let step = Move { decay: 0.9, rate: 0.3, square_factor: 1.7, eps: 1e-3 };
        let gradient = row([-4.0, 0.5, 0.25])?.to_dtype(state)?;
        let ((one, mut in_place), (other, mut by_tensors)) = (prepare()?, prepare()?);
        in_place.advance(&one, &gradient, (0.8, 0.7), &step)?;
        by_tensors.advance_by_tensors(&other, &gradient, (0.8, 0.7), &step)?;
        assert_eq!(in_place.master.is_some(), dtype == DType::BF16);
        let mut pairs = vec![
            (one.as_tensor().clone(), other.as_tensor().clone()),
            (in_place.mean, by_tensors.mean),
            (in_place.square, by_tensors.square),
        ];
        pairs.extend(in_place.master.zip(by_tensors.master));
        for (found, expected) in pairs {
            let numbers = |tensor: Tensor| tensor.to_dtype(DType::F64)?.to_vec1::<f64>();
            for (found, expected) in numbers(found)?.into_iter().zip(numbers(expected)?) {
                assert!((found - expected).abs() < tolerance, "{dtype:?}: {found} {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_model_sees_steps_of_parameters_that_are_their_own_masters() -> Result<()> {
    let var = Var::new(&[1.0f32], &Device::Cpu)?;
    // A model holds its weights as tensors, which share the memory of their variables.
    let weight = var.as_tensor().clone();
    let mut optimizer = AdamW::new(&BTreeMap::from([("w".to_string(), var)]), AdamWConfig::default())?;
    assert!(optimizer.moments().all(|(_, moments)| moments.master.is_none()));
    optimizer.step(&named("w", Tensor::new(&[1.0f32], &Device::Cpu)?), 0.1)?;
    assert!((weight.to_vec1::<f32>()?[0] - 0.9).abs() < 1e-6);
    Ok(())
}

#[test]
fn eps_is_added_to_the_root() -> Result<()> {
    let var = Var::new(&[1.0f64], &Device::Cpu)?;
    let variables = BTreeMap::from([("w".to_string(), var.clone())]);
    let mut optimizer = AdamW::new(&variables, AdamWConfig { eps: 3.0, ..AdamWConfig::default() })?;
    optimizer.step(&named("w", Tensor::new(&[1.0f64], &Device::Cpu)?), 0.1)?;
    assert!((var.to_vec1::<f64>()?[0] - (1.0 - 0.1 / (1.0 + 3.0))).abs() < 1e-12);
    Ok(())
}

#[test]
fn small_steps_of_bf16_weights_add_up_in_the_master() -> Result<()> {
    let var = Var::from_tensor(&Tensor::new(&[1.0f32], &Device::Cpu)?.to_dtype(DType::BF16)?)?;
    let variables = BTreeMap::from([("w".to_string(), var.clone())]);
    let mut optimizer = AdamW::new(&variables, AdamWConfig::default())?;
    // A step of 1e-4 is below the resolution of bf16 at 1 (2^-8); 100 of them are not.
    for _ in 0..100 {
        optimizer.step(&named("w", Tensor::new(&[1.0f32], &Device::Cpu)?), 1e-4)?;
    }
    let master =
        optimizer.moments().next().and_then(|(_, moments)| moments.master.as_ref()).expect("bf16 is too narrow");
    assert_eq!(master.dtype(), DType::F32);
    let value = var.to_dtype(DType::F32)?.to_vec1::<f32>()?[0];
    assert!((value - 0.99).abs() < 0.003, "{value}");
    Ok(())
}

#[test]
fn a_parameter_without_gradient_only_decays() -> Result<()> {
    let var = Var::new(&[[2.0f32]], &Device::Cpu)?;
    let variables = BTreeMap::from([("w".to_string(), var.clone())]);
    let mut optimizer = AdamW::new(&variables, AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() })?;
    optimizer.step(&Gradients::from_named(BTreeMap::new()), 0.1)?;
    assert_eq!(var.to_vec2::<f32>()?, [[1.9]]);
    Ok(())
}

/// Variables of every type and of no, one and two dimensions, and an optimizer that took some steps on them.
fn trained(seed: u64) -> Result<(BTreeMap<String, Var>, AdamW)> {
    let device = Device::Cpu;
    let values = |count: usize| (0..count).map(|i| ((seed + 1) as f64 * (i as f64 + 0.3)).sin()).collect::<Vec<f64>>();
    let tensor = |shape: &[usize], dtype| {
        Tensor::from_vec(values(shape.iter().product()), shape, &device).and_then(|tensor| tensor.to_dtype(dtype))
    };
    let mut variables = BTreeMap::new();
    for (name, shape, dtype) in [
        ("a.weight", &[3usize, 2][..], DType::F32),
        ("b.weight", &[2, 5], DType::BF16),
        ("c.bias", &[4], DType::F64),
        ("d.scale", &[], DType::F16),
    ] {
        variables.insert(name.to_string(), Var::from_tensor(&tensor(shape, dtype)?)?);
    }
    let mut optimizer = AdamW::new(&variables, AdamWConfig::default())?;
    for step in 0..3 {
        optimizer.step(&gradients(&variables, step)?, 0.01)?;
    }
    Ok((variables, optimizer))
}

fn gradients(variables: &BTreeMap<String, Var>, step: usize) -> Result<Gradients> {
    let gradient = |var: &Var| ((var.to_dtype(state_dtype(var.dtype()))? * 0.3)? + (step as f64 - 0.7))?.cos();
    let named = variables.iter().map(|(name, var)| Ok((name.clone(), gradient(var)?)));
    Ok(Gradients::from_named(named.collect::<Result<_>>()?))
}

/// All bits of variables and state.
fn bits(variables: &BTreeMap<String, Var>, optimizer: &AdamW) -> Vec<Vec<u8>> {
    let mut tensors: Vec<&Tensor> = variables.values().map(Var::as_tensor).collect();
    for (_, moments) in optimizer.moments() {
        tensors.extend([&moments.mean, &moments.square].into_iter().chain(&moments.master));
    }
    tensors.into_iter().map(|tensor| safetensors::View::data(tensor).into_owned()).collect()
}

#[test]
fn state_comes_back_bit_for_bit_and_steps_go_on_the_same() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("optimizer.safetensors");
    let (variables, mut optimizer) = trained(1)?;
    optimizer.save(&path)?;

    let copy = |var: &Var| Var::from_tensor(&var.as_tensor().detach().copy()?);
    let copies = variables.iter().map(|(name, var)| Ok((name.clone(), copy(var)?))).collect::<Result<_>>()?;
    let mut loaded = AdamW::load(&copies, AdamWConfig::default(), &path)?;
    assert_eq!(loaded.steps(), 3);
    assert_eq!(bits(&copies, &loaded), bits(&variables, &optimizer));
    for step in 3..6 {
        optimizer.step(&gradients(&variables, step)?, 0.01)?;
        loaded.step(&gradients(&copies, step)?, 0.01)?;
        assert_eq!(bits(&copies, &loaded), bits(&variables, &optimizer), "step {step}");
    }
    Ok(())
}

#[test]
fn the_file_has_the_form_that_other_tools_read() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("optimizer.safetensors");
    let (_, optimizer) = trained(2)?;
    optimizer.save(&path)?;
    let bytes = std::fs::read(&path).expect("it was written");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a safetensors file");
    assert_eq!(header.metadata().as_ref().and_then(|metadata| metadata.get("format")).map(String::as_str), Some("pt"));
    let mut names = header.offset_keys();
    names.sort();
    let expected = [
        "master.b.weight",
        "master.d.scale",
        "mean.a.weight",
        "mean.b.weight",
        "mean.c.bias",
        "mean.d.scale",
        "square.a.weight",
        "square.b.weight",
        "square.c.bias",
        "square.d.scale",
        "steps",
    ];
    assert_eq!(names, expected);
    // The same state is the same file, and others may read it as far as they may read other new files.
    let other = dir.path().join("other");
    optimizer.save(&other)?;
    assert_eq!(std::fs::read(&other).expect("it was written"), bytes);
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "").expect("it can be written");
    let permissions = |path: &std::path::Path| std::fs::metadata(path).expect("a file").permissions();
    assert_eq!(permissions(&path), permissions(&plain));
    Ok(())
}

#[test]
fn state_of_other_parameters_is_refused_with_names_and_counts() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("optimizer.safetensors");
    let (variables, optimizer) = trained(1)?;
    optimizer.save(&path)?;
    let refused = |variables: &BTreeMap<String, Var>| {
        let error = AdamW::load(variables, AdamWConfig::default(), &path).unwrap_err();
        assert!(error.is_usage());
        error.to_string()
    };

    let mut more = variables.clone();
    for name in ["e", "f"] {
        more.insert(name.to_string(), Var::new(&[1.0f32], &Device::Cpu)?);
    }
    let text = refused(&more);
    assert!(text.contains("optimizer.safetensors: this optimizer state cannot be used"), "{text}");
    assert!(text.contains("4 missing (mean.e, mean.f, square.e, ..); resume with"), "{text}");

    let mut fewer = variables.clone();
    fewer.remove("b.weight");
    let text = refused(&fewer);
    assert!(text.contains("3 unexpected (master.b.weight, mean.b.weight, square.b.weight); resume"), "{text}");

    let mut other = variables.clone();
    other.insert("a.weight".to_string(), Var::zeros((2, 3), DType::F64, &Device::Cpu)?);
    other.insert("b.weight".to_string(), Var::zeros((2, 5), DType::F32, &Device::Cpu)?);
    let text = refused(&other);
    assert!(text.contains("1 unexpected (master.b.weight), 2 of another type or shape"), "{text}");
    assert!(text.contains("mean.a.weight is F32 [3, 2], needed is F64 [2, 3]"), "{text}");
    Ok(())
}

#[test]
fn damaged_state_is_refused_with_what_is_wrong() -> Result<()> {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("optimizer.safetensors");
    let (variables, mut optimizer) = trained(1)?;
    optimizer.save(&path)?;
    let whole = std::fs::read(&path).expect("it was written");
    let load = || AdamW::load(&variables, AdamWConfig::default(), &path).unwrap_err().to_string();
    let with = |bytes: &[u8]| {
        std::fs::write(&path, bytes).expect("it can be written");
        load()
    };
    let len = whole.len();
    let text = with(&whole[..len - 1]);
    assert!(text.contains(&format!("cut short ({len} bytes expected by its header, {} found)", len - 1)), "{text}");
    for cut in [0, 7, 20] {
        let text = with(&whole[..cut]);
        assert!(text.contains("cut short") && text.contains(&format!("{cut} found")), "{text}");
    }
    let text = with(&[&whole[..], b"x"].concat());
    assert!(text.contains("too long"), "{text}");
    let text = with(b"\x02\0\0\0\0\0\0\0[]");
    assert!(text.contains("not a usable safetensors file (its header: "), "{text}");
    let text = with(b"<html>an error page</html>");
    assert!(text.contains("cut short"), "{text}");

    for (steps, told) in [(usize::MAX, "(-1 steps)"), (1 << 32, "(4294967296 steps)")] {
        optimizer.steps = steps;
        optimizer.save(&path)?;
        let text = load();
        assert!(text.contains(told), "{text}");
    }
    std::fs::remove_file(&path).expect("it is there");
    let text = load();
    assert!(text.starts_with("cannot read ") && text.contains("optimizer.safetensors"), "{text}");
    let text = optimizer.save(&dir.path().join("absent/optimizer.safetensors")).unwrap_err().to_string();
    assert!(text.starts_with("cannot write ") && text.contains("absent"), "{text}");
    Ok(())
}
