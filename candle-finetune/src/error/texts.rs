//! Parts of messages that are not the same for all values.

use candle_cp::Launcher;

use super::LineFault;

/// Faults that a message shows; the rest is counted.
const SHOWN_FAULTS: usize = 20;

pub fn list(faults: &[LineFault]) -> String {
    let mut text: String = faults.iter().take(SHOWN_FAULTS).map(|fault| format!("\n  {fault}")).collect();
    if faults.len() > SHOWN_FAULTS {
        text += &format!("\n  and {} more", faults.len() - SHOWN_FAULTS);
    }
    text
}

pub fn told_by(launcher: Option<Launcher>, (rank, size): (usize, usize)) -> String {
    match launcher {
        Some(launcher) => format!("{launcher} says that this is rank {rank} of {size}, but MPI says"),
        None => "no launcher says that this is one of several processes, but MPI says".to_string(),
    }
}

pub fn fix_world(launcher: Option<Launcher>) -> &'static str {
    match launcher {
        Some(Launcher::Slurm) => {
            "srun did not speak to the MPI that the program is linked with (ldd shows its library). Start it with srun \
             --mpi=pmix where that is OpenMPI, --mpi=pmi2 where it is MPICH (srun --mpi=list tells what there is)"
        }
        _ => {
            "the program is probably linked with another MPI than the one that started it. Start it with the mpirun of that \
             MPI (ldd shows its library), build it with this one"
        }
    }
}

pub fn did_you_mean(nearest: Option<&str>) -> String {
    nearest.map_or_else(|| "--help lists all of them".to_string(), |nearest| format!("the nearest is {nearest}"))
}

pub fn why_nothing_fits(seq_len: usize, truncate: bool) -> String {
    match truncate {
        true => format!("no sample has a learned token within the {seq_len} tokens of a row"),
        false => format!("no sample fits a row of {seq_len} tokens"),
    }
}

pub fn fix_nothing_fits(longest: usize, truncate: bool) -> String {
    match truncate {
        true => format!("give --seq-len {longest} to keep them whole"),
        false => format!("give --seq-len {longest} to keep them all, or cut them with --truncate"),
    }
}
