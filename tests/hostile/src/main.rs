//! `kfd-hostile`: what a guest process can do to the host, and what its neighbours are promised meanwhile.
//!
//! ```text
//! kfd-hostile attack SEED FRAMES [NAME]   sends garbage, of every kind or one; fails if any of it was accepted
//! kfd-hostile neighbour            calls and checks the answers until its input ends
//! kfd-hostile hold                 takes resources and waits on an event for ever, to be killed
//! kfd-hostile take BYTE NEXT       takes the dma-buf that is its input, finds it full of BYTE, fills it with NEXT
//! kfd-hostile rounds N             connects, takes resources and closes, N times
//! ```
//! Which host is chosen by the environment, as for the library: `VIRTIO_KFD_LOOPBACK`, `VIRTIO_KFD_DEVICE`.

mod attack;
mod neighbour;
mod random;
mod raw;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kfd-hostile: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |text: &str| text.parse::<u64>().with_context(|| format!("{text:?}: expected a number"));
    match arguments.as_slice() {
        ["attack", seed, frames] => attack::run(number(seed)?, number(frames)?, None),
        ["attack", seed, frames, name] => attack::run(number(seed)?, number(frames)?, Some(name)),
        ["neighbour"] => neighbour::run(),
        ["hold"] => neighbour::hold(),
        ["take", word, next] => neighbour::take_shared(number(word)?, number(next)?),
        ["rounds", rounds] => neighbour::rounds(number(rounds)?),
        _ => bail!(
            "usage: attack SEED FRAMES [NAME] | neighbour | hold | take BYTE NEXT | rounds N, found {arguments:?}"
        ),
    }
}
