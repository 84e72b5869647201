//! What no process of the host side ever does.

macro_rules! calls {
    ($($name:ident),* $(,)?) => { &[$((libc::$name, stringify!($name))),*] };
}

/// What is denied to a supervisor whose workers have the KFD model under them: userfaultfd is not, which the
/// [model](super::model) may use.
pub fn never_with_model() -> Vec<(i64, &'static str)> {
    never().iter().copied().filter(|(number, _)| *number != libc::SYS_userfaultfd).collect()
}

/// Calls that are denied to the supervisor and so to all that it starts: other processes' memory, the kernel
/// itself, name spaces and mounts, and interfaces with a large surface that none of them uses.
pub fn never() -> &'static [(i64, &'static str)] {
    calls![
        SYS_ptrace,
        SYS_process_madvise,
        SYS_kcmp,
        SYS_pidfd_getfd,
        SYS_bpf,
        SYS_perf_event_open,
        SYS_userfaultfd,
        SYS_io_uring_setup,
        SYS_io_uring_enter,
        SYS_io_uring_register,
        SYS_init_module,
        SYS_finit_module,
        SYS_delete_module,
        SYS_kexec_load,
        SYS_kexec_file_load,
        SYS_reboot,
        SYS_swapon,
        SYS_swapoff,
        SYS_syslog,
        SYS_acct,
        SYS_quotactl,
        SYS_mount,
        SYS_umount2,
        SYS_pivot_root,
        SYS_chroot,
        SYS_open_tree,
        SYS_move_mount,
        SYS_fsopen,
        SYS_fsconfig,
        SYS_fsmount,
        SYS_fspick,
        SYS_mount_setattr,
        SYS_unshare,
        SYS_setns,
        SYS_add_key,
        SYS_request_key,
        SYS_keyctl,
        SYS_personality,
        SYS_modify_ldt,
        SYS_ioperm,
        SYS_iopl,
        SYS_clock_settime,
        SYS_settimeofday,
        SYS_adjtimex,
        SYS_clock_adjtime,
        SYS_sethostname,
        SYS_setdomainname,
        SYS_name_to_handle_at,
        SYS_open_by_handle_at,
        SYS_fanotify_init,
        SYS_lookup_dcookie,
        SYS_move_pages,
        SYS_migrate_pages,
        SYS_vhangup,
    ]
}
