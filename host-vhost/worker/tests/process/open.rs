//! Start, handshake, topology, the end.

use std::fs::{self, File};

use kfd_ipc::worker::{Settings, ToWorker};
use virtio_kfd_protocol::calls::*;
use virtio_kfd_protocol::topology::unpack;
use virtio_kfd_protocol::*;

use crate::support::*;

fn failed(profile: Option<&str>, settings: Settings) -> String {
    let mut worker = Worker::spawn(profile);
    worker.send(&ToWorker::Start(settings), None);
    let (Other::Failed(message), _) = worker.other() else { panic!("it started") };
    assert_eq!(worker.wait().0, 1);
    message
}

#[test]
fn it_says_what_it_found_and_ends_with_the_channel() {
    let mut worker = Worker::spawn(Some("gfx906"));
    worker.send(&ToWorker::Start(settings()), None);
    // The model plays Linux 6.12, whose KFD is 1.17.
    assert_eq!(worker.other().0, Other::Ready { kfd: (1, 17), gpu_count: 1 });
    let (status, log) = worker.end();
    assert_eq!(status, 0, "{log}");
    assert!(log.contains("no new privileges, no capabilities"), "{log}");
}

#[test]
fn it_is_confined_before_it_is_ready() {
    let worker = Worker::ready("gfx906", settings());
    let status = fs::read_to_string(format!("/proc/{}/status", worker.pid())).unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2", "CapEff:\t0000000000000000", "CapPrm:\t0000000000000000"] {
        assert!(status.contains(line), "{line}\n{status}");
    }
}

#[test]
fn selectors_choose_gpus_and_one_that_matches_nothing_lists_them() {
    for (selectors, count) in [(vec![], 2), (vec!["1"], 1), (vec!["gfx906"], 2), (vec!["renderD129"], 1)] {
        let gpus = selectors.iter().map(|text| text.to_string()).collect();
        let mut worker = Worker::ready("gfx906x2", Settings { gpus, ..settings() });
        assert_eq!(worker.hello().unwrap().gpu_count, count, "{selectors:?}");
    }
    let message = failed(Some("gfx906x2"), Settings { gpus: vec!["gfx1100".into()], ..settings() });
    for part in ["\"gfx1100\"", "0 = gfx906, renderD128", "1 = gfx906, renderD129"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_kfd_without_gpus_is_served_where_no_gpu_is_asked_for() {
    let mut worker = Worker::ready("none", settings());
    assert_eq!(worker.hello().unwrap().gpu_count, 0);
    let (_, apertures) = worker.call::<GetApertures>(&Nothing {}, &[]).unwrap();
    assert!(apertures.is_empty());
    let message = failed(Some("none"), Settings { gpus: vec!["0".into()], ..settings() });
    assert!(message.contains("no GPU"), "{message}");
}

#[test]
fn without_kfd_it_says_what_is_missing() {
    if fs::exists("/dev/kfd").unwrap() {
        eprintln!("skipped: this machine has /dev/kfd");
        return;
    }
    let message = failed(None, settings());
    assert!(message.contains("/dev/kfd does not exist") && message.contains("modprobe amdgpu"), "{message}");
}

#[test]
fn nothing_works_before_the_handshake_nor_in_another_version() {
    let mut worker = Worker::ready("gfx906", settings());
    assert_eq!(worker.failure::<Nop>(&Nothing {}, &[]), (Status::HANDSHAKE, 0));

    let mut hello = |min, max| {
        let request = HelloRequest { version_min: min, version_max: max, ..Default::default() };
        let mut frame = frame(0);
        frame.push::<Hello>(&request, &[], 0).unwrap();
        frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
        worker.frame(0, frame);
        worker.answer(0).statuses()
    };
    assert_eq!(hello(2, 9), [Status::HANDSHAKE, Status::NOT_RUN]);
    assert_eq!(hello(1, 9), [Status::OK, Status::OK], "both in the frame of the handshake");
    assert_eq!(hello(1, 1), [Status::INVALID, Status::NOT_RUN], "once");

    assert!(worker.call::<Nop>(&Nothing {}, &[]).is_ok());
    for version in [0, 2] {
        let mut frame = frame(version);
        frame.push::<Nop>(&Nothing {}, &[], 0).unwrap();
        worker.frame(0, frame);
        assert_eq!(worker.answer(0).statuses(), [Status::HANDSHAKE], "version {version}");
    }
}

#[test]
fn the_archive_holds_the_given_gpu_and_no_other_node() {
    let given = Settings { gpus: vec!["1".into()], vram_limit: Some(1 << 30), ..settings() };
    let mut worker = Worker::greeted("gfx906x2", given);
    let (answer, bytes) = worker.call::<TopologyRead>(&TopologyReadRequest { offset: 0 }, &[]).unwrap();
    assert_eq!(answer.total, bytes.len() as u64);
    let files = unpack(&bytes).unwrap();
    let nodes: std::collections::BTreeSet<&str> =
        files.iter().filter_map(|file| file.path.split('/').nth(1)).collect();
    assert_eq!(nodes.into_iter().collect::<Vec<_>>(), ["2"]);
    let content = |path: &str| {
        let file = files.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("{path}"));
        String::from_utf8(file.content.clone()).unwrap()
    };
    assert_eq!(content("generation_id").trim(), answer.generation.to_string());
    assert!(content("nodes/2/properties").contains("gfx_target_version 90006\n"));
    assert!(content("nodes/2/mem_banks/0/properties").contains("size_in_bytes 1073741824\n"));

    let (_, apertures) = worker.call::<GetApertures>(&Nothing {}, &[]).unwrap();
    let ids: Vec<u32> = apertures.iter().map(|apertures| apertures.gpu_id.0).collect();
    assert_eq!(ids, [content("nodes/2/gpu_id").trim().parse::<u32>().unwrap()]);

    let (_, rest) = worker.call::<TopologyRead>(&TopologyReadRequest { offset: 10 }, &[]).unwrap();
    assert_eq!(rest, bytes[10..]);
    let beyond = TopologyReadRequest { offset: answer.total + 1 };
    assert_eq!(worker.failure::<TopologyRead>(&beyond, &[]), (Status::INVALID, 0));
}

#[test]
fn calls_that_the_runtimes_make_at_their_start() {
    let mut worker = Worker::greeted("gfx906", settings());
    let (_, apertures) = worker.call::<GetApertures>(&Nothing {}, &[]).unwrap();
    // kfd_flat_memory.c: LDS at 1 << 48 and scratch at 2 << 48 since GFX9, 4 GiB each.
    let [aperture] = apertures[..] else { panic!("{apertures:?}") };
    assert_eq!((aperture.lds_base, aperture.lds_limit), (1 << 48, (1 << 48) | 0xffff_ffff));
    assert_eq!(aperture.scratch_base, 2 << 48);
    let gpu_id = aperture.gpu_id;
    let gpu = GpuRequest { gpu_id, pad: 0 };
    worker.call::<AcquireVm>(&gpu, &[]).unwrap();
    worker.call::<AcquireVm>(&gpu, &[]).expect("the same render node again is no error");
    let policy = SetMemoryPolicyRequest { gpu_id, ..Default::default() };
    worker.call::<SetMemoryPolicy>(&policy, &[]).unwrap();
    // kfd_ioctl_set_xnack_mode of a kernel without SVM support, which this model plays.
    assert_eq!(worker.failure::<SetXnackMode>(&XnackMode { mode: -1, pad: 0 }, &[]), (Status::ERRNO, 1));
    let (clocks, _) = worker.call::<GetClockCounters>(&gpu, &[]).unwrap();
    assert_eq!(clocks.system_clock_freq, 1_000_000_000);
    assert_ne!(clocks.gpu_clock_counter, 0);
    let (clocks, _) = worker.call::<GetClockCounters>(&GpuRequest::default(), &[]).unwrap();
    assert_eq!(clocks.gpu_clock_counter, 0, "no GPU");
    let scratch = SetScratchBackingVaRequest { va: GuestVa(0x10000), gpu_id, pad: 0 };
    worker.call::<SetScratchBackingVa>(&scratch, &[]).unwrap();
    let trap = SetTrapHandlerRequest { gpu_id, ..Default::default() };
    worker.call::<SetTrapHandler>(&trap, &[]).unwrap();
    let tiles = GetTileConfigRequest { gpu_id, max_tile_configs: 64, max_macro_tile_configs: 64, pad: 0 };
    let (config, entries) = worker.call::<GetTileConfig>(&tiles, &[]).unwrap();
    assert_eq!(entries.len() as u32, config.num_tile_configs + config.num_macro_tile_configs);
    let many = GetTileConfigRequest { max_tile_configs: 65, ..tiles };
    assert_eq!(worker.failure::<GetTileConfig>(&many, &[]), (Status::INVALID, 0));
    let (version, _) = worker.call::<RenderVersion>(&gpu, &[]).unwrap();
    assert_eq!(version.major, 3, "amdgpu's DRM interface");
    let info =
        |query, return_size, arguments| RenderInfoRequest { gpu_id, query, return_size, arguments, pad: 0 };
    let (_, working) = worker.call::<RenderInfo>(&info(0, 4, [0; 4]), &[]).unwrap();
    assert_eq!(working, [1, 0, 0, 0]);
    let (_, device) = worker.call::<RenderInfo>(&info(0x16, 440, [0; 4]), &[]).unwrap();
    assert_eq!(device.len(), 440);
    // PCI ids: 0x66a0 to 0x66af are Vega 20.
    assert_eq!(u32::from_le_bytes(device[..4].try_into().unwrap()) & 0xfff0, 0x66a0);
    worker.call::<RenderInfo>(&info(0x15, 4, [0x263e, 1, u32::MAX, 0]), &[]).unwrap();
    for (query, size) in [(0x16, 0), (0x16, 4097)] {
        assert_eq!(worker.failure::<RenderInfo>(&info(query, size, [0; 4]), &[]), (Status::INVALID, 0));
    }
    assert_eq!(worker.failure::<RenderInfo>(&info(0x1b, 16, [1, 0, 0, 0]), &[]), (Status::NOT_SUPPORTED, 0));
}

#[test]
fn xnack_is_off_and_stays_off() {
    // With it a GPU's fault would bring in this process's own memory (svm_range_restore_pages, kfd_svm.c).
    let mut text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../kfd-model/profiles/gfx90a.toml"))
            .unwrap();
    text = text.replace("kfd_minor = 17", "kfd_minor = 17\nsvm = true");
    let retries = text.replace("xnack_per_process = true", "xnack_per_process = true\nretry_faults = true");
    assert_ne!(text, retries);
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [("per-process.toml", text), ("noretry-0.toml", retries)] {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        let mut worker = Worker::greeted(path.to_str().unwrap(), settings());
        let set = |mode| XnackMode { mode, pad: 0 };
        let (asked, _) = worker.call::<SetXnackMode>(&set(-1), &[]).unwrap();
        assert_eq!(asked.mode, 0, "{name}");
        for mode in [1, 2, i32::MAX] {
            assert_eq!(worker.failure::<SetXnackMode>(&set(mode), &[]), (Status::ERRNO, 1), "{name} {mode}");
        }
        worker.call::<SetXnackMode>(&set(0), &[]).unwrap();
        assert_eq!(worker.call::<SetXnackMode>(&set(-1), &[]).unwrap().0.mode, 0, "{name}");
    }
}

#[test]
fn gpus_of_others_are_not_there() {
    let mut worker = Worker::greeted("gfx906x2", Settings { gpus: vec!["0".into()], ..settings() });
    let mut all = Worker::greeted("gfx906x2", settings());
    let (_, apertures) = all.call::<GetApertures>(&Nothing {}, &[]).unwrap();
    for gpu_id in [apertures[1].gpu_id, GpuId(1), GpuId(u32::MAX), GpuId(0)] {
        let gpu = GpuRequest { gpu_id, pad: 0 };
        let alloc = AllocMemoryRequest { gpu_id, size: 4096, flags: 1, ..Default::default() };
        let render = RenderInfoRequest { gpu_id, return_size: 4, ..Default::default() };
        let results = [
            worker.failure::<AcquireVm>(&gpu, &[]),
            worker.failure::<AvailableMemory>(&gpu, &[]),
            worker.failure::<RenderVersion>(&gpu, &[]),
            worker.failure::<RenderInfo>(&render, &[]),
            worker.failure::<AllocMemory>(&alloc, &[]),
            worker.failure::<SetTrapHandler>(&SetTrapHandlerRequest { gpu_id, ..Default::default() }, &[]),
        ];
        assert_eq!(results, [(Status::NO_SUCH_GPU, 0); 6], "{gpu_id:?}");
    }
}

#[test]
fn what_no_device_sends_ends_it_with_a_reason() {
    let file = File::open("/dev/null").unwrap();
    let frame = |bytes| ToWorker::Frame { ring: 0, ticket: 1, bytes };
    let messages: [(&str, ToWorker<'_>, Option<&File>); 6] = [
        ("a second Start", ToWorker::Start(settings()), None),
        ("a frame on ring 64", ToWorker::Frame { ring: 64, ticket: 1, bytes: &[] }, None),
        ("the frame header needs 48 bytes", frame(&[0; 47]), None),
        ("magic", frame(&[0; 64]), None),
        ("without a file", ToWorker::AddRegion { region: 1, file_offset: 0, size: 4096 }, None),
        ("whole pages", ToWorker::AddRegion { region: 1, file_offset: 1, size: 4096 }, Some(&file)),
    ];
    for (reason, message, file) in messages {
        let mut worker = Worker::ready("none", settings());
        worker.send(&message, file);
        let (status, log) = worker.wait();
        assert_eq!(status, 1, "{reason}: {log}");
        assert!(log.contains(reason), "{reason}: {log}");
    }
}

#[test]
fn started_by_hand_it_says_how_it_is_started() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kfd-worker")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("started by vhost-user-kfd"));
}
