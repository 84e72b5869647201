//! Streams of system management events.

use std::time::{Duration, Instant};

use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::limits::MAX_SMI_STREAMS;
use virtio_kfd_protocol::*;

use crate::support::*;

const RINGS: u8 = 12;

/// How long a wait lasts that nothing ends, and what is enough for the end of all on a loaded machine.
const WAIT_MS: u32 = 240_000;
const ENOUGH: Duration = Duration::from_secs(120);

fn open(worker: &mut Worker, gpu_id: GpuId) -> Result<u32, Status> {
    let request = GpuRequest { gpu_id, pad: 0 };
    let mut one = frame(VERSION);
    one.push::<OpenSmi>(&request, &[], 0).unwrap();
    worker.frame(0, one);
    let answer = worker.answer(0);
    let status = answer.statuses()[0];
    answer.decode::<OpenSmi>(0).map(|(made, _)| made.stream).map_err(|_| status)
}

fn close(worker: &mut Worker, stream: u32) -> Status {
    worker.failure::<CloseSmi>(&SmiStream { stream, pad: 0 }, &[]).0
}

fn ask(worker: &mut Worker, ring: u8, timeout: u32) {
    let mut one = frame(VERSION);
    one.push::<ReadSmi>(&ReadSmiRequest { timeout, pad: 0 }, &[], 1024).unwrap();
    worker.frame(ring, one);
}

fn outcome(worker: &mut Worker, ring: u8) -> u32 {
    worker.answer(ring).decode::<ReadSmi>(0).unwrap().0.outcome
}

fn gpu(worker: &mut Worker) -> GpuId {
    worker.call::<GetApertures>(&Nothing {}, &[]).unwrap().1[0].gpu_id
}

/// One that slept on would keep what was closed, for as long as it waits.
#[test]
fn all_waits_end_with_the_last_stream() {
    let mut worker = Worker::greeted("gfx906", settings());
    let gpu_id = gpu(&mut worker);
    for round in 0..40 {
        let first = open(&mut worker, gpu_id).unwrap();
        for ring in 1..=RINGS {
            ask(&mut worker, ring, WAIT_MS);
        }
        let second = open(&mut worker, gpu_id).unwrap();
        let begin = Instant::now();
        assert_eq!([first, second].map(|stream| close(&mut worker, stream)), [Status::OK; 2]);
        for ring in 1..=RINGS {
            assert_eq!(outcome(&mut worker, ring), SMI_CLOSED, "round {round}, ring {ring}");
        }
        assert!(begin.elapsed() < ENOUGH, "round {round}: a wait slept on");
    }
    // What ended them does not end those that come later.
    let stream = open(&mut worker, gpu_id).unwrap();
    ask(&mut worker, 1, 50);
    assert_eq!(outcome(&mut worker, 1), SMI_NOTHING);
    assert_eq!(close(&mut worker, stream), Status::OK);
}

#[test]
fn streams_are_limited_and_closed_once() {
    let mut worker = Worker::greeted("gfx906", settings());
    let gpu_id = gpu(&mut worker);
    assert_eq!(open(&mut worker, GpuId(gpu_id.0 ^ 1)), Err(Status::NO_SUCH_GPU));
    for _ in 0..2 {
        let streams: Vec<u32> = (0..MAX_SMI_STREAMS).map(|_| open(&mut worker, gpu_id).unwrap()).collect();
        assert_eq!(open(&mut worker, gpu_id), Err(Status::LIMIT));
        for stream in streams {
            assert_eq!(close(&mut worker, stream), Status::OK);
            assert_eq!(close(&mut worker, stream), Status::BAD_HANDLE);
        }
    }
    ask(&mut worker, 1, u32::MAX);
    assert_eq!(outcome(&mut worker, 1), SMI_CLOSED);
}
