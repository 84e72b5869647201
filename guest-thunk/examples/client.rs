//! Connects to the host and makes some calls: the first thing to run in a guest that does not work yet.
//!
//! ```text
//! client [calls]       the number of Nops for the round-trip time, 1000 by default
//! ```
//! Which host is chosen by the environment, as for the library: `VIRTIO_KFD_LOOPBACK`, `VIRTIO_KFD_DEVICE`.

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use guest_thunk::client::Client;
use virtio_kfd_protocol::calls::{GetClockCounters, Nop};
use virtio_kfd_protocol::{GpuRequest, Nothing};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("client: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let calls: u32 = match std::env::args().nth(1) {
        Some(text) => text.parse().map_err(|error| format!("number of calls {text:?}: {error}"))?,
        None => 1000,
    };
    let start = Instant::now();
    let client = Client::connect()?;
    let (major, minor) = client.kfd_version();
    println!("connected in {:?}", start.elapsed());
    println!("kfd {major}.{minor}");
    println!("gpus {}", client.gpu_count());
    println!("features {:?}", client.features());

    let start = Instant::now();
    for _ in 0..calls {
        client.call::<Nop>(&Nothing {}, &[], 0)?;
    }
    println!("nop {calls} calls, {:?} each", start.elapsed().checked_div(calls).unwrap_or_default());

    let mut batch = client.batch();
    let tickets = (0..32).map(|_| batch.push::<Nop>(&Nothing {}, &[], 0)).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    let answers = batch.run()?;
    println!("batch of {} in {:?}", tickets.len(), start.elapsed());
    for ticket in tickets {
        answers.get(ticket)?;
    }

    let (clocks, _) = client.call::<GetClockCounters>(&GpuRequest::default(), &[], 0)?;
    println!("clock {} ns of {} Hz", clocks.system_clock_counter, clocks.system_clock_freq);

    let files = client.topology()?;
    println!("topology {} files", files.len());
    for file in files.iter().filter(|file| !file.path.contains("/caches/")) {
        let text = String::from_utf8_lossy(&file.content);
        println!("  {}: {}", file.path, text.lines().collect::<Vec<_>>().join("; "));
    }
    Ok(())
}
