//! The launch environment, from tables instead of this process's own variables.

use candle_cp::{LaunchEnvironment, Result, launch_environment_from};

const WHOLE: [(&str, &str); 5] =
    [("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "node-0"), ("MASTER_PORT", "29500")];

fn read(variables: &[(&str, &str)]) -> Result<Option<LaunchEnvironment>> {
    launch_environment_from(|name| variables.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
}

fn with(changes: &[(&'static str, &'static str)]) -> Result<Option<LaunchEnvironment>> {
    read(&[&WHOLE[..], changes].concat())
}

#[test]
fn whole_or_absent() {
    let expected = LaunchEnvironment { rank: 5, size: 8, local_rank: 1, address: "node-0".into(), port: 29500 };
    assert_eq!(with(&[]).unwrap(), Some(expected));
    assert_eq!(read(&[]).unwrap(), None);
    assert_eq!(read(&[("PATH", "/bin"), ("RANK", ""), ("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap(), None);
}

#[test]
fn the_port_of_an_agent_is_left_to_it() {
    let port = |store| with(&[("TORCHELASTIC_USE_AGENT_STORE", store)]).unwrap().unwrap().port;
    assert_eq!([port("True"), port("False"), port("")], [29501, 29500, 29500]);
    let error = with(&[("MASTER_PORT", "65535"), ("TORCHELASTIC_USE_AGENT_STORE", "True")]).unwrap_err().to_string();
    assert!(error.contains("MASTER_PORT is 65535, but ports go from 1 to 65534"), "{error}");
}

#[test]
fn half_an_environment_lists_what_is_there_and_what_is_not() {
    for keep in 1..31u32 {
        let kept: Vec<_> = WHOLE.iter().enumerate().filter(|(i, _)| keep >> i & 1 == 1).map(|(_, v)| *v).collect();
        let error = read(&kept).unwrap_err().to_string();
        let (found, missing) = error.split_once(", but ").unwrap();
        for (i, (name, value)) in WHOLE.iter().enumerate() {
            let kept = keep >> i & 1 == 1;
            assert_eq!(found.contains(&format!("{name}={value}")), kept, "{error}");
            let missing = missing.split(';').next().unwrap();
            assert_eq!(missing.split([' ', ',']).any(|word| word == *name), !kept, "{error}");
        }
    }
    let one = with(&[("LOCAL_RANK", " ")]).unwrap_err().to_string();
    assert!(one.contains("LOCAL_RANK is missing or empty"), "{one}");
}

#[test]
fn values_that_make_no_sense_are_named() {
    for (name, value, part) in [
        ("RANK", "8", "RANK is 8, but WORLD_SIZE is 8, which makes the ranks 0..8"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is 0"),
        ("RANK", "-1", "RANK is \"-1\", but a whole number is expected"),
        ("WORLD_SIZE", "two", "WORLD_SIZE is \"two\""),
        ("LOCAL_RANK", "0x1", "LOCAL_RANK is \"0x1\""),
        ("MASTER_PORT", "http", "MASTER_PORT is \"http\""),
        ("MASTER_PORT", "0", "MASTER_PORT is 0, but ports go from 1 to 65535"),
        ("MASTER_PORT", "70000", "MASTER_PORT is 70000"),
    ] {
        let error = with(&[(name, value)]).unwrap_err().to_string();
        assert!(error.contains(part), "{name}={value}: {error}");
    }
}
