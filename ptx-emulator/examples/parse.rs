//! Parses a PTX file and names its kernels: `parse FILE`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).ok_or("usage: parse FILE")?;
    let module = ptx_emulator::Module::parse(&std::fs::read_to_string(path)?)?;
    module.kernels().for_each(|kernel| println!("{kernel}"));
    Ok(())
}
